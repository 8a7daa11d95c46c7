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

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.disk import replace_file
from mlx_t5.errors import UserError, reason, shown
from mlx_t5.grouping import by_length
from mlx_t5.network.cache import Cache
from mlx_t5.network.encoding import encoder_states, prepared
from mlx_t5.training.examples import Example
from mlx_t5.training.loss import LOGITS_AT_ONCE

if TYPE_CHECKING:
    from model import T5

TOP_K = 8  # tokens; together they have 0.999 of the bundled target's probability
SHARD = 64  # examples in a file
Tokens = tuple[int, ...]
# A function of some examples and their indices among all examples. It yields the answer to each
# example in order, or None if answering the example failed.
Answer = Callable[[Sequence[Example], Sequence[int]], Iterator[Tokens | None]]


@dataclass(frozen=True)
class LabeledExample:
    """An example with its answer, and with the K likeliest tokens at each position of the answer.

    Attributes:
        source: (S,) the S tokens of the prompt, EOS included.
        answer: (T,) the T tokens of the answer.
        top_ids: (T, K) the target's K likeliest tokens at each position.
        top_p: (T, K) float32, the probabilities of these tokens.
        states: a function that returns the target's encoder output (S, d_model); for a stored
            example, it reads the output from disk, in 16 bits. None if the output is not kept.
    """

    source: np.ndarray
    answer: np.ndarray
    top_ids: np.ndarray
    top_p: np.ndarray
    states: Callable[[], np.ndarray] | None = None


def given(source: Sequence[int], answer: Sequence[int]) -> LabeledExample:
    """Returns an example with this answer; each token of the answer has probability 1."""
    ids = np.array(answer, np.int32)
    return LabeledExample(np.array(source), ids, ids[:, None], np.ones((len(ids), 1), np.float32))


class Answers:
    """The files with the labeled examples of one run."""

    def __init__(self, folder: Path, examples: Sequence[Example]) -> None:
        """Opens the folder of the files, and makes the folder if necessary.

        Args:
            folder: the folder of the files; answers of an earlier run are used again.
            examples: the examples to answer; the earlier run must have had the same examples.
        """
        self.folder, self.examples = folder, examples
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> int:
        """The number of answered examples, counted up to the first missing file."""
        shards = -(-len(self.examples) // SHARD)
        written = next((i for i in range(shards) if not self._file(i).exists()), shards)
        return min(written * SHARD, len(self.examples))

    def complete(
        self,
        target: T5,
        answer: Answer,
        temp: float,
        keep_states: bool,
        answered: Callable[[], object],
    ) -> None:
        """Labels the examples that are not on disk yet, and writes them to disk.

        If an example has no answer yet, the answer is generated first.

        Args:
            target: the target, a `model.T5`.
            answer: the function that generates the answers.
            temp: the temperature of the probabilities; 0 means 1.
            keep_states: whether to keep the target's encoder output.
            answered: a function that is called after every example.

        Raises:
            UserError: the disk is full.
        """
        first = self.done
        remaining = self.examples[first:]
        unanswered = [i for i, example in enumerate(remaining, first) if example.answer is None]
        answers = answer([self.examples[i] for i in unanswered], unanswered)
        for start in range(0, len(remaining), SHARD):
            pairs = []
            for example in remaining[start : start + SHARD]:
                tokens = next(answers) if example.answer is None else example.answer
                pairs += [(example.source, tokens)] if tokens else []
                answered()
            self._write((first + start) // SHARD, label(target, pairs, temp), keep_states)

    def labeled(self) -> list[LabeledExample]:
        """Reads all labeled examples, except those whose answers failed.

        Raises:
            UserError: a file is damaged.
        """
        labeled: list[LabeledExample] = []
        for shard in range(-(-len(self.examples) // SHARD)):
            try:
                labeled += self._read(shard)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                cause = f"{self._file(shard)} is damaged ({shown(reason(error))})"
                raise UserError(f"{cause}; remove it, and its prompts are answered again") from None
        return labeled

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
        """Writes the file of the encoder's output, then the file of the answers."""
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


def answer_notes(
    labeled: Sequence[LabeledExample], count: int, end: int, max_tokens: int
) -> Iterator[str]:
    """Yields lines about answers that failed or were cut off.

    Args:
        labeled: the examples whose answers did not fail.
        count: the number of all examples.
        end: the end token.
        max_tokens: maximum number of tokens in an answer.
    """
    if failed := count - len(labeled):
        yield f"{failed} prompts had no answer and are left out; try some with main.py"
    endless = [example.answer for example in labeled if example.answer[-1] != end]
    if endless:
        share = sum(map(len, endless)) / sum(len(example.answer) for example in labeled)
        yield (
            f"{len(endless)} of {len(labeled)} answers had no end within --max-tokens "
            f"{max_tokens} ({share:.0%} of all tokens); if that is much, check that the prompts "
            "have their task prefix"
        )


def label(
    target: T5, pairs: Sequence[tuple[Tokens, Tokens]], temp: float = 0.0
) -> list[LabeledExample]:
    """Returns the pairs as examples, with the target's likeliest tokens and their probabilities.

    One pass of the target computes the probabilities for several answers.

    Args:
        target: the target, a `model.T5`.
        pairs: the tokens of each source and those of its answer.
        temp: the temperature of the probabilities; 0 means 1.
    """
    labeled: dict[int, LabeledExample] = {}
    lengths = [(len(answer), len(source)) for source, answer in pairs]
    positions = LOGITS_AT_ONCE // target.config.vocab_size
    for group in by_length(lengths, len(pairs), positions):
        sources, answers = zip(*(pairs[i] for i in group), strict=True)
        states = encoder_states(target, sources)
        cache = prepared(target, sources, states)
        top_ids, top_p = _likeliest(target, cache, answers, temp or 1.0)
        wide = [row.astype(mx.float32) for row in states]
        mx.eval(top_ids, top_p, wide)
        for row, i in enumerate(group):
            ids, p = (np.array(top[row, : len(answers[row])]) for top in (top_ids, top_p))
            source, answer = np.array(sources[row]), np.array(answers[row])
            states_of_row = partial(np.array, wide[row])
            labeled[i] = LabeledExample(source, answer, ids, p, states_of_row)
    return [labeled[i] for i in range(len(pairs))]


def _likeliest(
    target: T5, cache: Cache, answers: Sequence[Tokens], temp: float
) -> tuple[mx.array, mx.array]:
    """Returns the K likeliest tokens at T positions of B answers, with probabilities: (B, T, K)."""
    longest = max(map(len, answers))
    start = target.config.decoder_start_token_id
    rows = [[start, *a[:-1]] + [start] * (longest - len(a)) for a in answers]
    p = mx.softmax(target.decode(mx.array(rows), cache, [0] * len(rows)) / temp, axis=-1)
    ids = mx.argpartition(-p, min(TOP_K, p.shape[-1]) - 1, axis=-1)[..., :TOP_K]
    return ids.astype(mx.int32), mx.take_along_axis(p, ids, axis=-1)


def _rows(file: Path, start: int, end: int) -> np.ndarray:
    """Returns rows of a file, which is then closed, because there may be thousands of files."""
    return np.array(np.load(file, mmap_mode="r")[start:end])


def joined(arrays: Sequence[Any], kind: type) -> np.ndarray:
    """Returns the arrays joined along their rows, in the type `kind`; empty if there are none."""
    return np.concatenate(arrays).astype(kind) if arrays else np.empty(0, kind)


def _cut(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cuts an array into parts whose numbers of rows are `lengths`; the inverse of `joined`.

    Raises:
        ValueError: the lengths do not add up to the number of rows.
    """
    if len(array) != sum(lengths.tolist()):
        raise ValueError("it lacks some of its rows")
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
