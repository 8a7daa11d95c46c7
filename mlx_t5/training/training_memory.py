"""Estimates the memory of training, and the number of rows in a micro-batch.

Symbols: B rows, S source positions, T answer positions, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_t5.backend import tree_flatten
from mlx_t5.network.cache import round_up, source_width
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import limit
from mlx_t5.sizes import readable
from mlx_t5.training.batches import ANSWER_STEP
from mlx_t5.training.loss import LOGITS_AT_ONCE
from mlx_t5.training.teacher_answers import TOP_K

if TYPE_CHECKING:
    from model import T5

FLOAT = 4  # bytes
STEP_SHARE = 0.125  # share of the memory for the activations of a step
# Copies of every trained number: itself, its gradient and an earlier micro-batch's, the update and
# what it replaces, and the square that Adafactor takes.
COPIES = 6
ADAM_COPIES = 9  # AdamW has three more: two moments and what replaces one of them
LOGIT_COPIES = 5  # of a chunk's logits: with their probabilities, the slope and its products


@dataclass(frozen=True)
class TrainingMemory:
    """The peak bytes of training.

    Attributes:
        draft: bytes of trained numbers, their gradients and the optimiser's arrays.
        step: bytes of a step's activations.
        rows: B, the rows of a micro-batch.
    """

    draft: int
    step: int
    rows: int


def estimate(
    draft: T5, source: int, target: int, batch_size: int, copies: int = COPIES, adapted: int = 0
) -> TrainingMemory:
    """Estimates the memory of training a draft or a model, without weights that are not trained.

    Args:
        draft: a `model.T5`.
        source: tokens of the longest prompt.
        target: tokens of the longest answer.
        batch_size: rows of a step.
        copies: copies of every trained number.
        adapted: copies of their inputs that the adapters of a layer keep.
    """
    trained = sum(array.size for _, array in tree_flatten(draft.trainable_parameters()))
    config, with_encoder = draft.config, draft.shares_with is None
    source, target = source_width(source), -(-target // ANSWER_STEP) * ANSWER_STEP
    of_row = row_bytes(config, source, target, with_encoder, draft.grad_checkpoint, adapted)
    rows = max(1, min(batch_size, int(STEP_SHARE * limit()) // of_row))
    tokens = config.draft_vocab_size or config.vocab_size
    logits = LOGIT_COPIES * FLOAT * min(max(LOGITS_AT_ONCE, tokens), rows * target * tokens)
    return TrainingMemory(copies * FLOAT * trained, rows * of_row + logits, rows)


def memory_notes(
    target: T5,
    size: TrainingMemory,
    names: tuple[str, str] = ("target", "draft"),
    cure: str = "a lower --max-tokens, shorter prompts or fewer --decoder-layers",
) -> Iterator[str]:
    """Returns lines about the memory that training takes beside the target, and if it suffices.

    Args:
        target: a `model.T5`.
        size: from `estimate`.
        names: names of the target, and of the trained model.
        cure: advice that reduces the memory.
    """
    weights = sum(array.nbytes for _, array in tree_flatten(target.parameters()))
    sizes = weights, size.draft, size.step
    parts = dict(zip((names[0], f"{names[1]} and optimiser", "a step"), sizes, strict=True))
    total, shown = sum(sizes), ", ".join(f"{n} {readable(b)}" for n, b in parts.items())
    yield f"memory: at most {readable(total)} of {readable(limit())} ({shown})"
    if total > limit():
        yield f"warning: that is more than there is; take {cure}"


def row_bytes(
    config: T5Config,
    source: int,
    target: int,
    with_encoder: bool,
    grad_checkpoint: bool = False,
    adapted: int = 0,
) -> int:
    """Returns the bytes of a row's activations, forward and backward; measured without a GPU.

    Args:
        config: the draft's config.
        source: S.
        target: T.
        with_encoder: whether the encoder is trained, too.
        grad_checkpoint: whether layers keep only their inputs.
        adapted: copies of their inputs that adapters keep.
    """
    inner, heads = config.num_heads * config.d_kv, config.num_heads
    hidden = config.d_ff * (5 if config.is_gated_act else 3)
    inputs = adapted * (5 * config.d_model + inner + config.d_ff)
    # Of a layer's position: residuals and norms, queries to outputs, the feed-forward.
    decoding = 10 * config.d_model + 14 * inner + hidden + 2 * inputs
    encoding = 6 * config.d_model + 8 * inner + hidden + inputs
    scores = 4 * heads * target * (round_up(target) + source)
    kept = 6 * source * (inner + adapted * config.d_model)  # keys and values of the source
    decoder = _layers(config.num_decoder_layers, target, decoding, scores, config, grad_checkpoint)
    total = decoder + config.num_decoder_layers * kept
    total += 3 * source * config.d_model + target * 3 * TOP_K
    if with_encoder:
        scores = 4 * heads * source * source
        total += _layers(config.num_layers, source, encoding, scores, config, grad_checkpoint)
    return FLOAT * total


def _layers(
    depth: int, length: int, width: int, scores: int, config: T5Config, grad_checkpoint: bool
) -> int:
    """Returns the numbers that layers keep: so many a position, and the attention scores."""
    if not grad_checkpoint:
        return depth * (length * width + scores)
    return length * width + scores + depth * length * 3 * config.d_model
