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

from acceptance import verify
from adaptive import AUTO, Adaptive
from backend import mx
from drafters import Drafter, Limits, Proposal
from memory import require
from model import T5
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
        adaptive: Adaptive | None = None,
        width: int = 1,
    ) -> None:
        """Starts an empty batch.

        Args:
            target: the model whose output is wanted.
            drafter: where proposals come from; None for regular decoding.
            clock: seconds, for the statistics.
            adaptive: how many to propose, for rows whose num_draft is "auto".
            width: rows of a full batch.
        """
        self.target, self.drafter, self.clock = target, drafter, clock
        self.adaptive, self.width = adaptive, width
        self.rows: list[Row] = []
        self.cache = None
        self.keys: mx.array | None = None  # (B, 2)
        self.sampling: Sampling | None = None
        # Called in every step with the rows, the target's logits (B, T, V) and the tokens (B, T)
        # as `acceptance.verify` returns them, all lazy; it must not wait for the device.
        self.on_verified: Callable[[list[Row], mx.array, mx.array], None] | None = None

    def step(self) -> None:
        """Drafts, verifies, accepts and commits once; rows that finish leave the batch."""
        started = self.clock()
        committed = [row.committed for row in self.rows]
        keys = self._step_keys()
        # Draft: up to gamma tokens x a row, drawn from q.
        proposal = self._draft(committed, keys)
        x, q, lengths = proposal.tokens, proposal.q, proposal.lengths
        # Verify: one pass of the target over the last token and x gives p after each of them.
        logits = self._verify(committed, x)
        p = self._process(logits, committed, x, lengths)
        # Accept: the longest acceptable prefix of x, then one token of the target's own.
        accepted, tokens = verify(p, x, q, mx.array(lengths, mx.int32), self.sampling, keys)
        if self.on_verified:
            self.on_verified(self.rows, logits, tokens)
        outcome = mx.concatenate([accepted[:, None], tokens], axis=1).tolist()  # the only wait
        # Commit: positions move on. Nothing is copied, and nothing has to be rolled back.
        self._commit(proposal, outcome, self.clock() - started)
        self.keep([i for i, row in enumerate(self.rows) if row.finish_reason is None])

    def _step_keys(self) -> mx.array | None:
        """Random keys (B, 2) of this step; None if every row is greedy."""
        if self.sampling.all_greedy:
            return None
        return fold(self.keys, mx.array([row.decided for row in self.rows]), 0)

    def _draft(self, committed: Sequence[list[int]], keys: mx.array | None) -> Proposal:
        """What the drafter proposes, which may be nothing."""
        proposal = None
        if self.drafter:
            proposal = self.drafter.propose(committed, self._limits(), self.sampling, keys)
        return proposal or Proposal.nothing(len(committed))

    def _limits(self) -> list[Limits]:
        """How many tokens each row may be proposed."""
        limits: list[Limits] = []
        tasks: dict[tuple[int, ...], Limits] = {}
        for row in self.rows:
            gamma = row.settings.num_draft
            if gamma != AUTO:
                limit = dict.fromkeys(self.drafter.usual, gamma)
            elif row.adapts:
                if row.task not in tasks:
                    tasks[row.task] = self.adaptive.limits(row.task, len(self.rows))
                limit = tasks[row.task]
            else:
                limit = self.adaptive.fixed(self.width)
            # One token a step is the target's own, so a row with r tokens to go can use r - 1.
            room = row.settings.max_tokens - row.decided - 1
            limits.append({kind: min(n, room) for kind, n in limit.items()} if room else {})
        return limits

    def _verify(self, committed: Sequence[list[int]], x: mx.array | None) -> mx.array:
        """Logits (B, gamma + 1, V) of the target after the last committed token and after x."""
        block = mx.array([[tokens[-1]] for tokens in committed], mx.int32)
        if x is not None:
            block = mx.concatenate([block, x], axis=1)
        positions = [len(tokens) - 1 for tokens in committed]
        self.cache.reserve(max(positions) + block.shape[1])
        return self.target.decode(block, self.cache, positions)

    def _process(
        self,
        logits: mx.array,
        committed: Sequence[list[int]],
        x: mx.array | None,
        lengths: Sequence[int],
    ) -> mx.array:
        """Applies the rows' rules for the text, if there are any."""
        if not self.sampling.processing:
            return logits
        history = History.of(committed).then(x)
        return self.sampling.processing(history, logits, [n + 1 for n in lengths])

    def _commit(self, proposal: Proposal, outcome: list[list[int]], seconds: float) -> None:
        """Adds to every row what the step decided, and lets the drafter learn from it."""
        eos = self.target.config.eos_token_id
        for i, (row, (accepted, *tokens)) in enumerate(zip(self.rows, outcome, strict=True)):
            row.stats.decode_seconds += seconds
            written, kept = row.commit(
                tokens[: accepted + 1], proposal.lengths[i], accepted, proposal.writers[i], eos
            )
            if self.drafter and row.adapts:
                drafted = proposal.lengths[i] if proposal.writers[i] == "draft" else 0
                ended = row.finish_reason == "stop"
                self.adaptive.note(row.task, drafted, kept, len(written), ended)
                if proposal.copies[i]:
                    text = written[: len(written) - row.ended]
                    self.adaptive.note_copy(row.task, proposal.copies[i], text)
        if self.drafter:
            self.drafter.note([row.committed for row in self.rows])

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

    def _set_rows(self, rows: list[Row]) -> None:
        """Makes `rows` the batch and collects their settings and keys."""
        self.rows = rows
        if rows:
            self.keys = mx.stack([row.key for row in rows])
            self.sampling = sampling_of(rows, self.target.config.eos_token_id)
