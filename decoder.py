"""Text to text: prompts of any form in, results or a stream of chunks out.

`SpeculativeDecoder` checks prompts and settings, turns them into rows, lets the engine (engine.py)
decode them, and makes results of what they became.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import batching
from backend import UserError, mx
from calibration import measure_costs
from draft_length import AUTO, Costs
from drafters import Drafter, DraftModel
from engine import Engine
from model import T5
from pace import History
from pacer import Pacer
from prompts import (
    PROMPT,
    checked_seed,
    random_keys,
    split,
    task_prefix,
    token_ids,
)
from ranges import checked, is_listlike, shown
from results import Chunk, Result, Row, Settings
from stop_strings import TextWatch
from text import decode, same_vocabulary

# Rows decoded at once when the caller gives many prompts and no batch size.
DEFAULT_BATCH_SIZE = 8


class SpeculativeDecoder:
    """Text to text with a target and, if given, a draft."""

    def __init__(
        self,
        model: T5,
        draft_model: T5 | Drafter | None = None,
        tokenizer=None,
        num_draft: int | str = 5,
        delta: float = 0.0,
        *,
        draft_tokenizer=None,
        clock: Callable[[], float] = time.perf_counter,
        costs: Costs | None = None,
    ) -> None:
        """Pairs the models.

        Args:
            model: the target.
            draft_model: a smaller T5 with the same tokenizer, a drafter, or None
                for regular decoding.
            tokenizer: as `model.load` returns it; None if prompts are token ids.
            num_draft: tokens proposed a step, at least 1; "auto" chooses anew for every step.
            delta: relaxation of the acceptance rule, 0 (lossless) to 1.
            draft_tokenizer: if given, compared with `tokenizer`.
            clock: seconds, for the statistics.
            costs: of steps, for "auto"; None measures them the first time on a machine.

        Raises:
            UserError: a value is out of range, or the vocabularies differ.
        """
        self.defaults = Settings(num_draft=num_draft, delta=delta)
        if self.defaults.num_draft == 0:
            raise UserError(
                'num_draft is 0; it must be at least 1, or "auto" '
                "(for regular decoding give no draft model)"
            )
        if tokenizer is not None and draft_tokenizer is not None:
            same_vocabulary(tokenizer, draft_tokenizer)
        self.model, self.tokenizer, self.clock = model, tokenizer, clock
        self.drafter = (
            DraftModel(draft_model, model) if isinstance(draft_model, T5) else draft_model
        )
        self.costs = costs
        self._measured: dict[tuple, Costs | None] = {}
        self.history = History()  # of what greedy rows got so far

    def generate(
        self,
        prompts: str | Iterable[str] | Iterable[int] | Iterable[Iterable[int]],
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
            batch_size: rows in flight at most; it bounds memory. Above 1024 it is 1024.
            num_samples: results a prompt, each with a stream of its own; needs temp > 0.
            **settings: any other of `results.Settings`, such as repetition_penalty.

        Returns:
            One result, or a list in the order of the prompts: all samples of the
            first, then all of the second, and so on.

            Of several, one that is empty, is no prompt or has an id outside the vocabulary, that
            the device has no memory for, or whose logits turn out NaN or infinite, has
            `finish_reason` "error", and the others finish.

        Raises:
            UserError: a value is out of range, or the only prompt cannot be decoded.
        """
        prompts, single = split(prompts)
        results = self.results(
            prompts, max_tokens, temp, top_k, top_p, seed, batch_size, num_samples, **settings
        )
        if not single:
            return list(results)
        results = list(results)
        if results[0].finish_reason == "error":
            raise UserError(results[0].error)
        return results[0] if len(results) == 1 else results

    def results(
        self,
        prompts: Iterable[str | Sequence[int] | Exception],
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        batch_size: int = DEFAULT_BATCH_SIZE,
        num_samples: int = 1,
        ready: Callable[[], bool] = lambda: True,
        **settings: Any,
    ) -> Iterator[Result]:
        """`generate` for many prompts, each result as soon as it and all before it are done.

        Prompts are drawn as they are needed, so there may be any number of them. An exception in
        the place of one that could not be read becomes the error of its result. While texts are
        being decoded, a prompt is drawn only if `ready` says that it need not be waited for.
        """
        batch_size, seed = checked("batch_size", batch_size), checked_seed(seed)
        samples = checked("num_samples", num_samples)
        settings = self._settings(max_tokens, temp, top_k, top_p, **settings)
        if samples > 1 and settings.temp == 0:
            many = f"all {shown(samples)} samples"
            raise UserError(f"temp is 0, so {many} would be equal; raise temp")
        if not is_listlike(prompts):
            raise UserError(f"prompts is {shown(prompts)}; it must be a list, each {PROMPT}")
        keys, width = random_keys(seed, samples), batch_size
        if isinstance(seed, list):
            prompts = list(prompts)
            if len(seed) != len(prompts):
                counts = f"{len(seed)} seeds for {len(prompts)} prompts"
                raise UserError(f"{counts}; give one seed or one a prompt")
        if isinstance(prompts, Sized):
            width = max(1, min(batch_size, len(prompts) * samples))
        each = (self.rows(prompt, settings, k) for prompt, k in zip(prompts, keys, strict=False))
        rows = itertools.chain.from_iterable(each)
        at_hand = lambda drawn: drawn % num_samples > 0 or ready()  # noqa: E731
        finished = batching.run(self.engine(settings, width), rows, batch_size, at_hand)
        return map(self.result, finished)

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
        keys = next(random_keys(checked("seed", seed)))
        (row,) = self.rows(prompt, settings, keys, watched=True)
        if row.error:
            raise UserError(row.error)
        return self._follow(row)

    def _follow(self, row: Row) -> Iterator[Chunk]:
        """Decodes a row and yields what each step adds."""
        engine = self.engine(row.settings)
        batching.Queue(engine, 1, [row]).admit()
        if row.error:
            raise UserError(row.error)
        while row.finish_reason is None:
            seen = row.decided
            engine.step()
            if row.error:
                raise UserError(row.error)
            yield self.chunk(row, seen)

    def _settings(
        self, max_tokens: int, temp: float, top_k: int, top_p: float, **others: Any
    ) -> Settings:
        settings = replace(
            self.defaults, max_tokens=max_tokens, temp=temp, top_k=top_k, top_p=top_p, **others
        )
        if settings.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; this model folder has none")
        if settings.top_k >= self.model.config.vocab_size:
            return replace(settings, top_k=0)  # no token is left out
        return settings

    def engine(self, settings: Settings, width: int = 1) -> Engine:
        """An engine for up to `width` rows; peak memory counts from here.

        Args:
            settings: of most of its rows; their costs are measured if `num_draft` is "auto".
            width: rows at the same time.
        """
        drafter = self.drafter.fresh() if self.drafter else None
        costs = self.costs
        if drafter and settings.num_draft == AUTO and costs is None:
            # Few widths are measured, or lists of 2, 3, 4 … prompts would each be a new case.
            full = DEFAULT_BATCH_SIZE
            while full < width:
                full *= 2
            widths = [1, full] if width > 1 else [1]
            # Truncation to the likeliest tokens takes time too; to how many does not matter.
            case = widths[-1], settings.temp > 0, settings.top_k > 0, settings.top_p < 1
            if case not in self._measured:
                self._measured[case] = measure_costs(self.model, drafter.model, widths, settings)
            costs = self._measured[case]
        mx.reset_peak_memory()
        return Engine(self.model, drafter, self.clock, Pacer(costs, width, self.history))

    def rows(
        self,
        prompt: str | Sequence[int] | Exception,
        settings: Settings,
        keys: Iterable[mx.array],
        watched: bool = False,
    ) -> Iterator[Row]:
        """Turns a prompt into a row for each key, finished by `error` if it cannot be used.

        The prompt is read once, and each row is made when it is asked for.

        Args:
            prompt: a text, token ids, or what is wrong with it.
            settings: of every row.
            keys: (2,) each, as `prompts.random_keys` makes them.
            watched: whether the text is to be read while it grows, for `chunk`.
        """
        ids, bad = [], prompt if isinstance(prompt, Exception) else None
        try:
            ids = [] if bad else token_ids(prompt, self.tokenizer, self.model.config.vocab_size)
        except UserError as error:
            bad = error
        for row in (Row(ids, settings, key) for key in keys):
            if bad:
                row.fail(str(bad))
            else:
                row.pace.task = task_prefix(ids, self.tokenizer)
                if settings.stop or (watched and self.tokenizer):
                    row.watch = TextWatch(self.tokenizer, settings.stop)
            yield row

    def chunk(self, row: Row, seen: int) -> Chunk:
        """What a row has got since `seen` tokens were decided, and its result if it is done."""
        tokens, writers = row.output(seen)
        pieces = row.watch.pieces[seen:] if row.watch else []
        text = "".join(pieces) + (row.watch.rest if row.watch else "")
        result = self.result(row) if row.finish_reason else None
        row.update_rates()
        return Chunk(text, tokens, writers, pieces, row.stats, result)

    def result(self, row: Row) -> Result:
        """What a finished row has become."""
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
