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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import batching
from acceptance import Sampling, fold, verify
from backend import UserError, mx
from cache import Cache
from drafters import Drafter, DraftModel, Proposal
from model import T5
from processors import History
from prompts import is_single, padded, random_keys, token_ids
from results import Chunk, Result, Row, Settings, sampling_of
from stop_strings import TextWatch
from text import decode, same_vocabulary

# Rows decoded at once when the caller gives many prompts and no batch size.
DEFAULT_BATCH_SIZE = 8


class Engine:
    """Rows in flight. `insert` adds some at any time, `step` advances all of them."""

    def __init__(
        self,
        target: T5,
        drafter: Drafter | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts an empty batch.

        Args:
            target: the model whose output is wanted.
            drafter: where proposals come from; None for regular decoding.
            clock: seconds, for the statistics.
        """
        self.target, self.drafter, self.clock = target, drafter, clock
        self.rows: list[Row] = []
        self.cache = None
        self.keys: mx.array | None = None  # (B, 2)
        self.sampling: Sampling | None = None

    def insert(self, rows: Sequence[Row]) -> None:
        """Encodes the source of new rows and adds them to the batch.

        Raises:
            RuntimeError: the device has not enough memory; the batch is as it was.
        """
        started = self.clock()
        sources = [tuple(row.ids) for row in rows]
        ids, mask = padded(sources, self.target.config.pad_token_id)
        cache = self._encoded(sources)
        mx.eval(cache.state)
        if self.drafter:
            self.drafter.insert(sources, ids, mask)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append(cache)
        for row in rows:
            row.committed = [self.target.config.decoder_start_token_id]
            row.stats.prompt_tokens = len(row.ids)
            row.stats.encode_seconds = self.clock() - started
        self._set_rows(self.rows + list(rows))

    def _encoded(self, sources: Sequence[tuple[int, ...]]) -> Cache:
        """The target's cache for these sources; several samples of one are encoded once."""
        different = list(dict.fromkeys(sources))
        ids, mask = padded(different, self.target.config.pad_token_id)
        cache = self.target.cache(self.target.encode(ids, mask), mask)
        if len(different) < len(sources):
            cache.keep([different.index(source) for source in sources])
        return cache

    def step(self) -> None:
        """Drafts, verifies and commits once; rows that finish leave the batch.

        Waits for the device once.
        """
        started = self.clock()
        proposal, outcome = self._draft_and_verify()
        outcome = outcome.tolist()  # the step's only synchronisation
        seconds = self.clock() - started
        eos = self.target.config.eos_token_id
        for i, (row, (accepted, *tokens)) in enumerate(zip(self.rows, outcome, strict=True)):
            drafted, writer = (proposal.lengths[i], proposal.writers[i]) if proposal else (0, "")
            row.commit(tokens[: accepted + 1], drafted, accepted, writer, eos)
            row.stats.decode_seconds += seconds
        self.keep([i for i, row in enumerate(self.rows) if row.finish_reason is None])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; the others leave the batch."""
        if list(rows) == list(range(len(self.rows))):
            return
        if rows:
            self.cache.keep(rows)
        else:
            self.cache = None
        if self.drafter:
            self.drafter.keep(rows)
        self._set_rows([self.rows[row] for row in rows])

    def _draft_and_verify(self) -> tuple[Proposal | None, mx.array]:
        """Puts one step into the graph without waiting for it.

        Returns:
            What was proposed, and (B, T + 1) int32: how many of it were accepted,
            then the tokens as `acceptance.verify` returns them.
        """
        committed = [row.committed for row in self.rows]
        positions = [row.decided for row in self.rows]
        keys = None if self.sampling.all_greedy else fold(self.keys, mx.array(positions), 0)
        # One token a step is the target's own, so a row with r tokens to go can use r - 1.
        lengths = [
            min(row.settings.num_draft, row.settings.max_tokens - row.decided - 1)
            for row in self.rows
        ]
        proposal = None
        if self.drafter:
            proposal = self.drafter.propose(committed, lengths, self.sampling, keys)

        block = mx.array([[tokens[-1]] for tokens in committed], mx.int32)
        drafts = q = None
        if proposal is None:
            lengths = [0] * len(self.rows)
        else:
            drafts, q, lengths = proposal.tokens, proposal.q, proposal.lengths
            block = mx.concatenate([block, drafts], axis=1)
        self.cache.reserve(max(positions) + block.shape[1])
        logits = self.target.decode(block, self.cache, positions)
        if self.sampling.processing:
            history = History.of(committed).then(drafts)
            logits = self.sampling.processing(history, logits, [n + 1 for n in lengths])
        accepted, tokens = verify(
            logits, drafts, q, mx.array(lengths, mx.int32), self.sampling, keys
        )
        return proposal, mx.concatenate([accepted[:, None], tokens], axis=1)

    def _set_rows(self, rows: list[Row]) -> None:
        """Makes `rows` the batch and collects their settings and keys."""
        self.rows = rows
        if rows:
            self.keys = mx.stack([row.key for row in rows])
            self.sampling = sampling_of(rows, self.target.config.eos_token_id)


class SpeculativeDecoder:
    """Text to text with a target and, if given, a draft."""

    def __init__(
        self,
        model: T5,
        draft_model: T5 | Drafter | None = None,
        tokenizer=None,
        num_draft: int = 5,
        delta: float = 0.0,
        *,
        draft_tokenizer=None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Pairs the models.

        Args:
            model: the target.
            draft_model: a smaller T5 with the same tokenizer, a drafter, or None
                for regular decoding.
            tokenizer: as `model.load` returns it; None if prompts are token ids.
            num_draft: tokens proposed a step, at least 1.
            delta: relaxation of the acceptance rule, 0 (lossless) to 1.
            draft_tokenizer: if given, compared with `tokenizer`.
            clock: seconds, for the statistics.

        Raises:
            UserError: a value is out of range, or the vocabularies differ.
        """
        if num_draft < 1:
            raise UserError(
                f"num_draft is {num_draft}; it must be at least 1 "
                "(for regular decoding give no draft model)"
            )
        if tokenizer is not None and draft_tokenizer is not None:
            same_vocabulary(tokenizer, draft_tokenizer)
        self.defaults = Settings(num_draft=num_draft, delta=delta)
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        self.drafter = (
            DraftModel(draft_model, model) if isinstance(draft_model, T5) else draft_model
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        num_samples: int = 1,
        **settings: Any,
    ) -> Result | list[Result]:
        """Decodes one prompt or several.

        Args:
            prompts: a text, a list of texts, token ids, or a list of those.
            max_tokens: generated tokens a prompt at most, EOS included.
            temp: temperature; 0 is greedy.
            top_k: sample among this many likeliest tokens; 0 is off.
            top_p: sample among the likeliest tokens that reach this mass.
            seed: of the whole call (row i then uses its own stream i), or one a
                prompt: prompt i alone with seed[i] gives the same tokens.
            batch_size: rows in flight at most; it bounds memory.
            num_samples: results a prompt, each with a stream of its own; needs temp > 0.
            **settings: any other of `results.Settings`, such as repetition_penalty.

        Returns:
            One result, or a list in the order of the prompts: all samples of the
            first, then all of the second, and so on.

        Raises:
            UserError: a value is out of range, a prompt is empty or has an id
                outside the vocabulary, or texts are given without a tokenizer.
        """
        single = is_single(prompts)
        prompts = [prompts] if single else prompts
        results = self.results(
            prompts, max_tokens, temp, top_k, top_p, seed, batch_size, num_samples, **settings
        )
        return next(results) if single and num_samples == 1 else list(results)

    def results(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        num_samples: int = 1,
        **settings: Any,
    ) -> Iterator[Result]:
        """`generate` for many prompts, each result as soon as it and all before it are done."""
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        if num_samples < 1:
            raise UserError(f"num_samples is {num_samples}; it must be at least 1")
        if num_samples > 1 and temp == 0:
            raise UserError(f"temp is 0, so all {num_samples} samples would be equal; raise temp")
        settings = self._settings(max_tokens, temp, top_k, top_p, **settings)
        keys = random_keys(seed, len(prompts), num_samples)
        each = (self._rows(p, settings, k) for p, k in zip(prompts, keys, strict=True))
        rows = [row for rows in each for row in rows]
        return map(self._result, batching.run(self._engine(), rows, batch_size))

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        **settings: Any,
    ) -> Iterator[Chunk]:
        """Decodes one prompt, step by step; arguments and errors as in `generate`.

        Yields:
            A chunk a step. The texts joined are the result's text.
        """
        settings = self._settings(max_tokens, temp, top_k, top_p, **settings)
        (row,) = self._rows(prompt, settings, *random_keys(seed, 1))
        if self.tokenizer and not row.watch:
            row.watch = TextWatch(self.tokenizer)
        return self._follow(row)

    def _follow(self, row: Row) -> Iterator[Chunk]:
        """Decodes a row and yields what each step adds."""
        engine = self._engine()
        batching.insert(engine, [row])
        if row.error:
            raise UserError(row.error)
        while row.finish_reason is None:
            seen = row.decided
            engine.step()
            tokens, writers = row.output(seen)
            pieces = row.watch.pieces[seen:] if row.watch else []
            text = "".join(pieces) + (row.watch.rest if row.watch else "")
            result = self._result(row) if row.finish_reason else None
            row.update_rates()
            yield Chunk(text, tokens, writers, pieces, row.stats, result)

    def _settings(
        self, max_tokens: int, temp: float, top_k: int, top_p: float, **others: Any
    ) -> Settings:
        return replace(
            self.defaults, max_tokens=max_tokens, temp=temp, top_k=top_k, top_p=top_p, **others
        )

    def _engine(self) -> Engine:
        mx.reset_peak_memory()
        drafter = self.drafter.fresh() if self.drafter else None
        return Engine(self.model, drafter, self.clock)

    def _rows(
        self, prompt: str | Sequence[int], settings: Settings, keys: Sequence[mx.array]
    ) -> list[Row]:
        """Checks a prompt and turns it into a row for each key."""
        ids = token_ids(prompt, self.tokenizer, self.model.config.vocab_size)
        if settings.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; this model folder has none")
        rows = [Row(ids, settings, key) for key in keys]
        for row in rows:
            row.watch = TextWatch(self.tokenizer, settings.stop) if settings.stop else None
        return rows

    def _result(self, row: Row) -> Result:
        if row.error:
            return Result(None, [], [], "error", row.stats, row.error)
        tokens, writers = row.output()
        row.update_rates()
        row.stats.peak_memory_bytes = mx.get_peak_memory()
        if row.watch:
            text = row.watch.text
        else:
            text = decode(self.tokenizer, tokens) if self.tokenizer else None
        return Result(text, tokens, writers, row.finish_reason, row.stats)
