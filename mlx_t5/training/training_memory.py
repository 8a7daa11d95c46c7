"""Estimates the memory that training takes, and chooses the number of rows in a micro-batch.

Symbols: B rows, S source positions, T answer positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_t5.backend import tree_flatten
from mlx_t5.backend.device_memory import limit
from mlx_t5.errors import readable
from mlx_t5.model import T5
from mlx_t5.network.cache import round_up, source_width
from mlx_t5.training.batches import answer_width
from mlx_t5.training.loss import LOGITS_AT_ONCE
from mlx_t5.training.teacher_answers import TOP_K

FLOAT = 4  # bytes
STEP_SHARE = 0.125  # share of the memory that a step's activations may take
# Arrays of the size of the trained parameters: the parameters, two gradients (of this micro-batch
# and the sum of the earlier ones), the update, the new parameters, and the squares for Adafactor.
COPIES = 6
ADAM_COPIES = 9  # AdamW has three more: its two moments, and the new value of one moment
LOGIT_COPIES = 5  # arrays of the size of a chunk's logits: also probabilities, gradient, products


@dataclass(frozen=True)
class TrainingMemory:
    """Peak memory in bytes: `draft` with gradients and optimizer, `step` for B = `rows`."""

    draft: int
    step: int
    rows: int


def estimate(
    draft: T5, source: int, target: int, batch_size: int, copies: int = COPIES, adapted: int = 0
) -> TrainingMemory:
    """Estimates the memory of training, and chooses the number of rows in a micro-batch.

    Args:
        draft: the trained model; weights that are not trained are not counted.
        source: number of tokens in the longest prompt.
        target: number of tokens in the longest answer.
        batch_size: number of rows in a step.
        copies: how many times the size of the trained parameters is needed; see `COPIES`.
        adapted: how many more arrays an adapted layer keeps, each as large as the layer's input.
    """
    trained = sum(array.size for _, array in tree_flatten(draft.trainable_parameters()))
    config, source = draft.config, source_width(source)
    target = answer_width(target)
    inner, heads = config.num_heads * config.d_kv, config.num_heads
    hidden = config.d_ff * (5 if config.is_gated_act else 3)
    inputs = adapted * (5 * config.d_model + inner + config.d_ff)
    # Numbers per layer and position: residuals and norms, then attention, then the feed-forward.
    # The factors were measured on a CPU.
    decoding = 10 * config.d_model + 14 * inner + hidden + 2 * inputs
    encoding = 6 * config.d_model + 8 * inner + hidden + inputs
    scores = 4 * heads * target * (round_up(target) + source)
    per_source = 6 * source * (inner + adapted * config.d_model)  # keys and values of the source

    def stack(depth: int, length: int, width: int, scores: int) -> int:
        if draft.grad_checkpoint:  # layers keep only their inputs; one is computed again at a time
            return length * width + scores + depth * length * 3 * config.d_model
        return depth * (length * width + scores)

    row = stack(config.num_decoder_layers, target, decoding, scores)
    row += config.num_decoder_layers * per_source
    row += 3 * source * config.d_model + target * 3 * TOP_K
    if draft.shares_with is None:
        row += stack(config.num_layers, source, encoding, 4 * heads * source * source)
    rows = max(1, min(batch_size, int(STEP_SHARE * limit()) // (FLOAT * row)))
    tokens = config.draft_vocab_size or config.vocab_size
    logits = LOGIT_COPIES * min(max(LOGITS_AT_ONCE, tokens), rows * target * tokens)
    return TrainingMemory(copies * FLOAT * trained, FLOAT * (rows * row + logits), rows)


def report_memory(model: T5, size: TrainingMemory, cure: str, log: Callable[[str], object]) -> None:
    """Logs the memory of training; `model` is the fine-tuned one, or the draft's target."""
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    parts = f"model {readable(weights)}, training {readable(size.draft)}"
    total = weights + size.draft + size.step
    parts += f", a step {readable(size.step)}"
    log(f"memory: at most {readable(total)} of {readable(limit())} ({parts})")
    if total > limit():
        log(f"warning: that is more than there is; use {cure}")
