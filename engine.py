"""The engine: speculative decoding of a batch whose rows are never aligned.

One step, for all rows at once:

    draft    the drafter proposes up to gamma tokens a row       (drafters.py)
    verify   one pass of the target over gamma + 1 positions     (model.py)
    accept   the longest acceptable prefix and one token more    (acceptance.py)
    commit   the kept tokens join the row; nothing is copied

After every step the target's cache of a row holds exactly committed[:-1]: the
last committed token is the first of the next block. Slots past it may hold
rejected proposals; the next block overwrites them before they can be seen.
So rolling back is no work at all: a row's position is len(committed) - 1.

Decoding without a draft is the same loop with nothing proposed. The method is
that of https://arxiv.org/abs/2211.17192 and https://arxiv.org/abs/2302.01318.
Symbols: B rows, S source positions, gamma proposals, T = gamma + 1, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from acceptance import NO_TOKEN, accepted_length, verify
from backend import mx
from draft_length import AUTO, LONGEST
from drafters import NOTHING, Drafter, Offer, Proposal
from memory import require
from model import T5
from pacer import Pacer
from processors import History
from prompts import encoded
from results import Row, sampling_of
from sampling import Sampling, fold


class Engine:
    """Rows in flight. `insert` adds some at any time, `step` advances all of them."""

    def __init__(
        self,
        target: T5,
        drafter: Drafter | None,
        clock: Callable[[], float] = time.perf_counter,
        pacer: Pacer | None = None,
    ) -> None:
        """Starts an empty batch.

        Args:
            target: the model whose output is wanted.
            drafter: where proposals come from; None for regular decoding.
            clock: seconds, for the statistics.
            pacer: how many to propose, for rows whose num_draft is "auto".
        """
        self.target, self.drafter, self.clock = target, drafter, clock
        self.pacer = pacer or Pacer()
        self.rows: list[Row] = []
        self.cache = None
        self.keys: mx.array | None = None  # (B, 2)
        self.sampling: Sampling | None = None
        # Called in every step with the rows, the target's logits (B, T, V) and the tokens (B, T)
        # as `acceptance.verify` returns them, all lazy; it must not wait for the device.
        self.on_verified: Callable[[list[Row], mx.array, mx.array], None] | None = None

    def insert(self, rows: Sequence[Row]) -> None:
        """Encodes the source of new rows and adds them to the batch.

        Raises:
            RuntimeError: the device has not enough memory; the batch is as it was.
        """
        started = self.clock()
        sources = [row.ids for row in rows]
        self._require_memory(rows)
        cache = encoded(self.target, sources)
        if self.drafter:
            self.drafter.insert(sources)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append(cache)
        for row in rows:
            row.committed = [self.target.config.decoder_start_token_id]
            row.stats.prompt_tokens = len(row.ids)
            row.stats.encode_seconds = self.clock() - started
        self._set_rows(self.rows + list(rows))

    def _require_memory(self, new: Sequence[Row]) -> None:
        """Raises RuntimeError if there is not enough memory to read these rows and decode all.

        That is besides what is held now, as the cache that they join is copied.
        """
        rows = [*self.rows, *new]
        source = max(len(row.ids) for row in rows)
        target = max(row.settings.max_tokens for row in rows)
        sources = {tuple(row.ids) for row in new}  # equal ones are encoded once
        longest, models = max(map(len, sources)), [self.target]
        models += [self.drafter.model] if self.drafter and self.drafter.model else []
        caches = [model.cache_memory(len(rows), source, target) for model in models]
        require(sum(caches) + sum(m.encoder_memory(len(sources), longest) for m in models))

    def step(self) -> None:
        """Drafts, verifies and commits once; rows that finish leave the batch.

        Waits for the device once.
        """
        started = self.clock()
        offers, chosen = self.choose()
        proposal, outcome = self.draft_and_verify(chosen)
        mx.async_eval(outcome)
        self.pacer.learn(row.pace for row in self.rows)  # while the device is busy
        outcome = outcome.tolist()  # the step's only synchronisation
        seconds = self.clock() - started
        written = []
        for i, (row, (accepted, *tokens)) in enumerate(zip(self.rows, outcome, strict=True)):
            drafted = proposal.lengths[i] if proposal else 0
            writer = proposal.writers[i] if proposal else ""
            eos = self.target.config.eos_token_ids
            own = tokens[accepted] != NO_TOKEN
            tokens = tokens[: accepted + own]
            written.append(row.commit(tokens, drafted, accepted, writer, eos))
            row.stats.decode_seconds += seconds
            if not own and row.finish_reason is None:
                row.fail(no_choice(row))
        self.pacer.observe([row.pace for row in self.rows], offers, chosen, written)
        self.pacer.learn(row.pace for row in self.rows if row.finish_reason)
        self.keep([i for i, row in enumerate(self.rows) if row.finish_reason is None])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; the others leave the batch."""
        if list(rows) == list(range(len(self.rows))):
            return
        if rows:
            left = [self.rows[row] for row in rows]
            self.cache.keep(rows)
            # In a batch that never empties, one long prompt would make all rows as wide for good.
            self.cache.trim(max(len(r.ids) for r in left), max(r.decided for r in left))
        else:
            self.cache = None
        if self.drafter:
            self.drafter.keep(rows)
        self._set_rows([self.rows[row] for row in rows])

    def choose(self) -> tuple[list[list[Offer]], list[Offer]]:
        """What could be proposed for each row in the next step, and what is to be."""
        if not self.drafter:
            return [[]] * len(self.rows), [NOTHING] * len(self.rows)
        wanted = [row.settings.num_draft for row in self.rows]
        # One token a step is the target's own, so a row with r tokens to go can use r - 1.
        rooms = [row.settings.max_tokens - row.decided - 1 for row in self.rows]
        limits = [min(LONGEST if n == AUTO else n, r) for n, r in zip(wanted, rooms, strict=True)]
        resting = self.pacer.resting([row.pace for row in self.rows]) if AUTO in wanted else []
        resting = [i for i in resting if wanted[i] == AUTO]
        asleep = len(resting) == len(self.rows) and not self.drafter.model
        if asleep or not any(limits):
            return [[]] * len(self.rows), [NOTHING] * len(self.rows)
        offers = self.drafter.offers([row.committed for row in self.rows], limits, resting)
        chosen = [row[0] if row else NOTHING for row in offers]
        if AUTO in wanted:
            best = self.pacer.choose([row.pace for row in self.rows], offers)
            chosen = [b if n == AUTO else c for n, c, b in zip(wanted, chosen, best, strict=True)]
        return offers, chosen

    def draft_and_verify(self, chosen: Sequence[Offer]) -> tuple[Proposal | None, mx.array]:
        """Puts one step into the graph without waiting for it, and commits nothing.

        Args:
            chosen: the offer that each row takes up.

        Returns:
            What was proposed, and (B, T + 1) int32: how many of it were accepted,
            then the tokens as `acceptance.verify` returns them.
        """
        committed = [row.committed for row in self.rows]
        positions = [row.decided for row in self.rows]
        keys = None if self.sampling.all_greedy else fold(self.keys, mx.array(positions), 0)
        proposal = None
        if self.drafter:
            proposal = self.drafter.propose(committed, chosen, self.sampling, keys)

        block = mx.array([[tokens[-1]] for tokens in committed], mx.int32)
        drafts, q, lengths = None, None, [0] * len(self.rows)
        if proposal:
            drafts, q, lengths = proposal.tokens, proposal.q, proposal.lengths
            block = mx.concatenate([block, drafts], axis=1)
        self.cache.reserve(max(positions) + block.shape[1])
        logits = own = self.target.decode(block, self.cache, positions)
        if self.sampling.processing:
            history = History.of(committed).then(drafts)
            logits = self.sampling.processing(history, logits, [n + 1 for n in lengths])
        judged = mx.array(lengths, mx.int32)
        if proposal and proposal.sound is not None:
            judged = accepted_length(proposal.sound, judged)
        accepted, tokens = verify(logits, drafts, q, judged, self.sampling, keys)
        if self.on_verified:
            self.on_verified(self.rows, own, tokens)
        return proposal, mx.concatenate([accepted[:, None], tokens], axis=1)

    def _set_rows(self, rows: list[Row]) -> None:
        """Makes `rows` the batch and collects their settings and keys."""
        self.rows = rows
        if rows:
            self.keys = mx.stack([row.key for row in rows])
            self.sampling = sampling_of(rows, self.target.config.eos_token_ids)


def no_choice(row: Row) -> str:
    """What is wrong with a row whose logits are not finite."""
    first = "logits_processors, then the " if row.settings.logits_processors else ""
    return (
        f"the model's logits after {row.decided} tokens are NaN, infinite or all forbidden; check "
        f"the {first}weights, and use bfloat16 or float32 if they are float16"
    )
