"""Generates the target's answers and their probabilities, and keeps them on disk for training.

A draft has to guess the target's text, so it learns from the target's own answers (Kim and Rush,
https://arxiv.org/abs/1606.07947), which are generated before the training begins. For each position
of an answer, the files have the token of the answer, the `TOP_K` likeliest tokens and their
probabilities. If the draft reads the target's encoder output and the disk has room, this output is
kept as well: with a large target, computing it in every training step would take longer than the
rest of the step.

A file is written after every `SHARD` examples, so an interrupted run loses only its last answers.

Symbols: S source positions, T answer positions, K = TOP_K.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.disk import replace_file
from mlx_t5.errors import UserError, brief, reason
from mlx_t5.installation import command
from mlx_t5.model import T5
from mlx_t5.network.encoding import by_length, encoder_states, make_cache
from mlx_t5.training.examples import Example
from mlx_t5.training.loss import LOGITS_AT_ONCE

TOP_K = 8  # tokens; together they have 0.999 of the bundled target's probability
SHARD = 64  # examples in a file
Tokens = tuple[int, ...]
# A function of some examples and their indices among all examples. It yields the answer to each
# example in order, or None if answering the example failed.
Answer = Callable[[Sequence[Example], Sequence[int]], Iterator[Tokens | None]]


@dataclass(frozen=True)
class LabeledExample:
    """An example of S source and T answer tokens, EOS included.

    Attributes:
        source: (S,).
        answer: (T,).
        top_ids: (T, K) the target's K likeliest tokens at each position.
        top_p: (T, K) float32, the probabilities of these tokens.
        states: reads the target's encoder output (S, d_model), in 16 bits if it is on the disk.
    """

    source: np.ndarray
    answer: np.ndarray
    top_ids: np.ndarray
    top_p: np.ndarray
    states: Callable[[], np.ndarray] | None = None


def given(source: Sequence[int], answer: Sequence[int]) -> LabeledExample:
    ids = np.array(answer, np.int32)
    return LabeledExample(np.array(source), ids, ids[:, None], np.ones((len(ids), 1), np.float32))


class Answers:
    """The files with the labeled examples of one run; those of an earlier run are used again."""

    def __init__(self, folder: Path, examples: Sequence[Example]) -> None:
        self.folder, self.examples = folder, examples
        self._shards = range(math.ceil(len(examples) / SHARD))
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> int:
        written = next((i for i in self._shards if not self._file(i).exists()), len(self._shards))
        return min(written * SHARD, len(self.examples))

    def complete(
        self,
        target: T5,
        answer: Answer,
        temp: float,
        keep_states: bool,
        answered: Callable[[], object],
    ) -> None:
        """Answers and labels the examples that are not on disk yet."""
        first, count = self.done, len(self.examples)
        unanswered = [i for i in range(first, count) if self.examples[i].answer is None]
        answers = answer([self.examples[i] for i in unanswered], unanswered)
        for start in range(first, count, SHARD):
            pairs = []
            for example in self.examples[start : start + SHARD]:
                tokens = next(answers) if example.answer is None else example.answer
                if tokens:
                    pairs.append((example.source, tokens))
                answered()
            self._write(start // SHARD, label(target, pairs, temp), keep_states)

    def labeled(self) -> list[LabeledExample]:
        labeled: list[LabeledExample] = []
        for shard in self._shards:
            try:
                labeled += self._read(shard)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                cause = f"{self._file(shard)} is damaged ({brief(reason(error))})"
                raise UserError(f"{cause}; remove it, and its prompts are answered again") from None
        return labeled

    def report(
        self, labeled: Sequence[LabeledExample], end: int, most: int, log: Callable[[str], object]
    ) -> None:
        """Logs how many prompts have no answer, and how many answers no `end` within `most`."""
        failed = len(self.examples) - len(labeled)
        if failed:
            cure = f"try some with {command('generate')}"
            log(f"{failed} prompts had no answer and are left out; {cure}")
        endless = [example.answer for example in labeled if example.answer[-1] != end]
        if endless:
            share = sum(map(len, endless)) / sum(len(example.answer) for example in labeled)
            what = f"{len(endless)} of {len(labeled)} answers had no end within --max-tokens"
            cure = "if that is much, check that the prompts have their task prefix"
            log(f"{what} {most} ({share:.0%} of all tokens); {cure}")

    def _read(self, shard: int) -> list[LabeledExample]:
        with np.load(self._file(shard)) as arrays:
            keep_states, lengths = arrays["states"], arrays["lengths"]
            sources = _cut(arrays["sources"], lengths[:, 0])
            names = ("answers", "top_ids", "top_p")
            columns = [_cut(arrays[name], lengths[:, 1]) for name in names]
        sources_of_shard = {e.source for e in self.examples[shard * SHARD : (shard + 1) * SHARD]}
        if not sources_of_shard.issuperset(tuple(source.tolist()) for source in sources):
            raise ValueError("it belongs to other prompts")
        states: list[Any] = [None] * len(sources)
        if keep_states:
            file, ends = self._states(shard), [0, *np.cumsum(lengths[:, 0]).tolist()]
            if len(np.load(file, mmap_mode="r" if sources else None)) != ends[-1]:
                raise ValueError(f"{file.name} belongs to other prompts")
            states = [partial(_rows, file, *span) for span in pairwise(ends)]
        return list(map(LabeledExample, sources, *columns, states))

    def _file(self, shard: int) -> Path:
        return self.folder / f"answers-{shard:05}.npz"

    def _states(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05}.npy"

    def _write(self, shard: int, labeled: Sequence[LabeledExample], keep_states: bool) -> None:
        if keep_states:
            states = joined([e.states() for e in labeled if e.states], np.float16)
            replace_file(self._states(shard), lambda file: np.save(file, states))
        lengths = [(len(e.source), len(e.answer)) for e in labeled]
        arrays: dict[str, Any] = {
            "sources": joined([e.source for e in labeled], np.int32),
            "answers": joined([e.answer for e in labeled], np.int32),
            "top_ids": joined([e.top_ids for e in labeled], np.int32),
            "top_p": joined([e.top_p for e in labeled], np.float32),
            "lengths": np.array(lengths, np.int64).reshape(-1, 2),
            "states": np.array(keep_states),
        }
        replace_file(self._file(shard), lambda file: np.savez(file, **arrays))


def label(
    target: T5, pairs: Sequence[tuple[Tokens, Tokens]], temp: float = 0.0
) -> list[LabeledExample]:
    """Adds to sources and answers the target's likeliest tokens and their probabilities."""
    labeled: dict[int, LabeledExample] = {}
    lengths = [(len(answer), len(source)) for source, answer in pairs]
    positions = LOGITS_AT_ONCE // target.config.vocab_size
    for group in by_length(lengths, len(pairs), positions):
        sources, answers = zip(*(pairs[i] for i in group), strict=True)
        states = encoder_states(target, sources)
        longest, start = max(map(len, answers)), target.config.decoder_start_token_id
        rows = [[start, *a[:-1]] + [start] * (longest - len(a)) for a in answers]
        logits = target.decode(mx.array(rows), make_cache(target, sources, states), [0] * len(rows))
        p = mx.softmax(logits / (temp or 1.0), axis=-1)
        top_ids = mx.argpartition(-p, min(TOP_K, p.shape[-1]) - 1, axis=-1)[..., :TOP_K]
        top_ids, top_p = top_ids.astype(mx.int32), mx.take_along_axis(p, top_ids, axis=-1)
        wide = [row.astype(mx.float32) for row in states]
        mx.eval(top_ids, top_p, wide)
        for row, i in enumerate(group):
            ids, p = (np.array(top[row, : len(answers[row])]) for top in (top_ids, top_p))
            source, answer = np.array(sources[row]), np.array(answers[row])
            labeled[i] = LabeledExample(source, answer, ids, p, partial(np.array, wide[row]))
    return [labeled[i] for i in range(len(pairs))]


def _rows(file: Path, start: int, end: int) -> np.ndarray:
    # A copy, so that the file is closed: there may be thousands of them.
    return np.array(np.load(file, mmap_mode="r")[start:end])


def joined(arrays: Sequence[Any], kind: type) -> np.ndarray:
    return np.concatenate(arrays).astype(kind) if arrays else np.empty(0, kind)


def _cut(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    if len(array) != sum(lengths.tolist()):
        raise ValueError("it lacks some of its rows")
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
