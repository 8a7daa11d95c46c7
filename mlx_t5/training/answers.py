"""The target's answers and what it thought of them, kept on disk while a draft is trained.

A draft is to guess what the target writes, so it learns from the target's own answers (Kim and
Rush, https://arxiv.org/abs/1606.07947), which are made before the training begins. With each token
go the `TOP_K` likeliest tokens in its place and their probabilities. A draft that reads the
target's encoder output gets that from here too: making it anew in every step would take longer than
the step where the target is large.

Answers lie in files of `SHARD` examples. So a run that is stopped loses a part of one file at most.

Symbols: S source positions, T answer positions, K = TOP_K.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.disk import replace_file
from mlx_t5.errors import UserError, shown
from mlx_t5.network.cache import Cache
from mlx_t5.network.encoding import encoder_states, prepared
from mlx_t5.network.interface import Seq2Seq
from mlx_t5.training.examples import Example
from mlx_t5.training.loss import LOGITS_AT_ONCE

TOP_K = 8  # they hold 0.999 of the bundled target's mass
SHARD = 64  # examples in a file
Tokens = tuple[int, ...]
# Generates the answers to sources, in order, given the place of each among all examples; None for
# one that failed.
Answer = Callable[[Sequence[Tokens], Sequence[int]], Iterator[Tokens | None]]


@dataclass(frozen=True)
class LabelledExample:
    """An answered example.

    Attributes:
        source: (S,) tokens of the prompt, EOS included.
        answer: (T,) tokens of the answer.
        top_ids: (T, K) the target's likeliest tokens in the place of each.
        top_p: (T, K) float32, their probabilities.
        file: where the target's encoder output is; None if it is not kept.
        first: its first position in there.
    """

    source: np.ndarray
    answer: np.ndarray
    top_ids: np.ndarray
    top_p: np.ndarray
    file: Path | None = None
    first: int = 0

    @property
    def states(self) -> np.ndarray:
        """(S, d_model) float16, the target's encoder output, read from the disk."""
        assert self.file is not None, "it was not kept"
        kept = np.load(self.file, mmap_mode="r")
        return np.array(kept[self.first : self.first + len(self.source)])


class Answers:
    """The files of one run."""

    def __init__(self, folder: Path, examples: Sequence[Example]) -> None:
        """Finds what earlier runs have left in `folder`; `examples` are the same in all of them."""
        self.folder, self.examples = folder, examples
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> int:
        """How many examples have been answered: those of all files before one that is missing."""
        shards = -(-len(self.examples) // SHARD)
        there = next((i for i in range(shards) if not self._file(i).exists()), shards)
        return min(there * SHARD, len(self.examples))

    def complete(
        self,
        target: Seq2Seq,
        answer: Answer,
        temp: float,
        keep_states: bool,
        tell: Callable[[], object],
    ) -> None:
        """Has the target answer what is left.

        Args:
            target: the model.
            answer: generates the answers.
            temp: temperature of the probabilities.
            keep_states: whether to keep the encoder's output.
            tell: is called after every answer.

        Raises:
            UserError: the disk is full.
        """
        first = self.done
        left = self.examples[first:]
        unanswered = [i for i, example in enumerate(left, first) if example.answer is None]
        made = answer([self.examples[i].source for i in unanswered], unanswered)
        for start in range(0, len(left), SHARD):
            good = []
            for example in left[start : start + SHARD]:
                found = next(made) if example.answer is None else example.answer
                good += [(example.source, found)] if found else []
                tell()
            self._write((first + start) // SHARD, teach(target, good, temp), keep_states)

    def labelled(self) -> list[LabelledExample]:
        """All of them, without the examples whose answers failed.

        Raises:
            UserError: a file is damaged.
        """
        found: list[LabelledExample] = []
        for shard in range(-(-len(self.examples) // SHARD)):
            try:
                found += self._read(shard)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                reason = shown(str(error).split("\n")[0])
                raise UserError(
                    f"{self._file(shard)} is damaged ({reason}); remove it, and its prompts are "
                    "answered again"
                ) from None
        return found

    def _read(self, shard: int) -> list[LabelledExample]:
        with np.load(self._file(shard)) as arrays:
            kept = self._states(shard) if arrays["states"] else None
            lengths = arrays["lengths"]
            names = ("sources", "answers", "top_ids", "top_p")
            parts = [_cut(arrays[name], lengths[:, int(name != "sources")]) for name in names]
        positions = sum(lengths[:, 0].tolist())
        if kept and len(np.load(kept, mmap_mode="r" if positions else None)) != positions:
            raise ValueError(f"{kept.name} is of other prompts")
        asked = {e.source for e in self.examples[shard * SHARD : (shard + 1) * SHARD]}
        if not asked.issuperset(tuple(source.tolist()) for source in parts[0]):
            raise ValueError("it is of other prompts")
        firsts = accumulate(lengths[:, 0].tolist(), initial=0)
        return [
            LabelledExample(source, answer, ids, p, kept, first)
            for source, answer, ids, p, first in zip(*parts, firsts, strict=False)
        ]

    def _file(self, shard: int) -> Path:
        return self.folder / f"answers-{shard:05}.npz"

    def _states(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05}.npy"

    def _write(self, shard: int, taught: Sequence[Taught], keep_states: bool) -> None:
        """Writes a file of answers and, before it, that of the encoder's output."""
        if keep_states:
            states = [np.asarray(each.states, np.float16) for each in taught]
            replace_file(self._states(shard), lambda f: np.save(f, _joined(states, np.float16)))
        parts: dict[str, tuple[list, type]] = {
            "sources": ([each.source for each in taught], np.int32),
            "answers": ([each.answer for each in taught], np.int32),
            "top_ids": ([each.top_ids for each in taught], np.int32),
            "top_p": ([each.top_p for each in taught], np.float32),
        }
        arrays: dict[str, Any] = {name: _joined(*part) for name, part in parts.items()}
        lengths = [(len(each.source), len(each.answer)) for each in taught]
        arrays["lengths"] = np.array(lengths, np.int64).reshape(-1, 2)
        arrays["states"] = np.array(keep_states)
        replace_file(self._file(shard), lambda file: np.savez(file, **arrays))


@dataclass(frozen=True)
class Taught:
    """What the target thought of an answer; shapes as in `LabelledExample`."""

    source: Tokens
    answer: Tokens
    top_ids: np.ndarray
    top_p: np.ndarray
    states: np.ndarray


def teach(
    target: Seq2Seq, pairs: Sequence[tuple[Tokens, Tokens]], temp: float = 0.0
) -> list[Taught]:
    """The target's probabilities at every token of some answers, in one pass for several of them.

    Args:
        target: the model.
        pairs: sources and answers.
        temp: temperature of the probabilities; 0 takes them as they are.
    """
    found: dict[int, Taught] = {}
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0])))
    for group in _groups(order, pairs, target.config.vocab_size):
        sources, answers = zip(*(pairs[i] for i in group), strict=True)
        states = encoder_states(target, sources)
        cache = prepared(target, sources, states)
        top_ids, top_p = _likeliest(target, cache, answers, temp or 1.0)
        arrays = (top_ids, top_p, [each.astype(mx.float32) for each in states])
        mx.eval(arrays)
        for row, i in enumerate(group):
            ids, p = (np.array(each[row, : len(answers[row])]) for each in (top_ids, top_p))
            found[i] = Taught(sources[row], answers[row], ids, p, np.array(arrays[2][row]))
    return [found[i] for i in range(len(pairs))]


def _likeliest(
    target: Seq2Seq, cache: Cache, answers: Sequence[Tokens], temp: float
) -> tuple[mx.array, mx.array]:
    """The K likeliest tokens (B, T, K) in the place of each of some answers, and what they have."""
    longest = max(map(len, answers))
    start = target.config.decoder_start_token_id
    rows = [[start, *a[:-1]] + [start] * (longest - len(a)) for a in answers]
    cache.reserve(longest)
    p = mx.softmax(target.decode(mx.array(rows), cache, [0] * len(rows)) / temp, axis=-1)
    ids = mx.argpartition(-p, min(TOP_K, p.shape[-1]) - 1, axis=-1)[..., :TOP_K]
    return ids.astype(mx.int32), mx.take_along_axis(p, ids, axis=-1)


def _groups(
    order: Sequence[int], pairs: Sequence[tuple[Tokens, Tokens]], vocab_size: int
) -> Iterator[list[int]]:
    """Cuts answers, the shortest first, into groups whose logits are few enough."""
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * len(pairs[i][1]) * vocab_size > LOGITS_AT_ONCE:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _joined(parts: Sequence[object], kind: type) -> np.ndarray:
    """Arrays one below the other; one without rows if there are none."""
    return (
        np.concatenate([np.asarray(each, kind) for each in parts]) if parts else np.empty(0, kind)
    )


def _cut(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The opposite, for parts of these lengths.

    Raises:
        ValueError: the array has another length.
    """
    if len(array) != sum(lengths.tolist()):
        raise ValueError("it lacks some of its rows")
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
