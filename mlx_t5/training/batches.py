"""Groups labeled examples of similar length into batches.

A step's batch depends only on the examples, the batch size, the seed and the step's number, so a
resumed run gets the same batches.

Symbols: B rows, S source positions, T answer positions, K likeliest tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.model import T5
from mlx_t5.network.cache import source_width
from mlx_t5.network.encoding import by_length
from mlx_t5.training.examples import TrainingPair

if TYPE_CHECKING:
    from mlx_t5.training.teacher_answers import LabeledExample

BATCHES_AT_ONCE = 32  # batches cut from examples sorted together; more would be less random
ANSWER_STEP = 8  # T is a multiple of this number, so that few shapes occur


@dataclass(frozen=True)
class TrainingBatch:
    """A micro-batch of B examples, padded to S source and T answer positions.

    Attributes:
        source: (B, S) int32, the prompts' tokens.
        mask: (B, S) bool, False where the source is padded.
        states: (B, S, d_model) the target's encoder output; None if each step computes it.
        tokens: (B, T) int32, the start token, then the answer without its last token.
        top_ids: (B·T, K) int32, the K likeliest tokens at each position of the answers.
        top_p: (B·T, K) the probabilities of these tokens.
        counted: (B·T,) 1 for the answers' tokens, 0 for padding.
    """

    source: mx.array
    mask: mx.array
    states: mx.array | None
    tokens: mx.array
    top_ids: mx.array
    top_p: mx.array
    counted: mx.array

    @property
    def arrays(self) -> list[Any]:
        return list(vars(self).values())


def batch_at(
    labeled: Sequence[LabeledExample] | Sequence[TrainingPair], size: int, seed: int, step: int
) -> list[int]:
    size = min(size, len(labeled))
    steps = len(labeled) // size  # steps per epoch; each epoch leaves out different examples
    epoch, index = divmod(step, steps)
    rng = random.Random(f"order {seed} {epoch}")
    shuffled = rng.sample(range(len(labeled)), steps * size)
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), BATCHES_AT_ONCE * size):
        near = shuffled[start : start + BATCHES_AT_ONCE * size]
        # Negative, so that the shortest are first.
        lengths = [(-len(labeled[i].answer), -len(labeled[i].source)) for i in near]
        batches += [[near[i] for i in group] for group in by_length(lengths, size)]
    rng.shuffle(batches)
    return batches[index]


def micro_batches(
    labeled: Sequence[LabeledExample], draft: T5, size: int, rows: int, seed: int, step: int
) -> list[TrainingBatch]:
    return in_batches([labeled[i] for i in batch_at(labeled, size, seed, step)], draft, rows)


def in_batches(labeled: Sequence[LabeledExample], model: T5, rows: int) -> list[TrainingBatch]:
    tokens = model.config.decoder_start_token_id, model.config.pad_token_id
    have_states = model.shares_with is not None and all(e.states for e in labeled)
    starts = range(0, len(labeled), rows)
    return [collate(labeled[i : i + rows], *tokens, keep_states=have_states) for i in starts]


def collate(
    labeled: Sequence[LabeledExample], start_token: int, pad_token: int, keep_states: bool
) -> TrainingBatch:
    width = source_width(max(len(e.source) for e in labeled))
    length = -(-max(len(e.answer) for e in labeled) // ANSWER_STEP) * ANSWER_STEP
    sources = _padded([e.source for e in labeled], width, pad_token)
    fed = [np.concatenate([[start_token], e.answer[:-1]]) for e in labeled]
    states = [e.states() for e in labeled if keep_states and e.states]
    counted = [np.ones(len(e.answer), np.float32) for e in labeled]
    top_ids, top_p = [e.top_ids for e in labeled], [e.top_p for e in labeled]
    flat = [_padded(rows, length, 0) for rows in (top_ids, top_p, counted)]
    return TrainingBatch(
        mx.array(sources.astype(np.int32)),
        mx.array(np.arange(width) < np.array([[len(e.source)] for e in labeled])),
        mx.array(_padded(states, width, 0)) if keep_states else None,
        mx.array(_padded(fed, length, pad_token).astype(np.int32)),
        *(mx.array(rows.reshape(-1, *rows.shape[2:])) for rows in flat),
    )


def _padded(rows: Sequence[np.ndarray], width: int, filler: float) -> np.ndarray:
    """Pads B arrays (n, …) of different lengths n to one array (B, width, …)."""
    out = np.full((len(rows), width, *rows[0].shape[1:]), filler, rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
