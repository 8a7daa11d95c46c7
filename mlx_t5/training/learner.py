"""One step of training: a loss's gradient and the update, as functions of the state.

The state is what a step changes. A step returns a new one and leaves the old one alone, so whatever
interrupts it leaves a complete state.

All numbers that the model has of its own are trained. Of a draft that shares the target's encoder,
embedding and head these are its decoder's. The table of a draft's own vocabulary stays as it is.

Rates follow the scale of each tensor, as Adafactor's do with which T5 was trained (Shazeer and
Stern, https://arxiv.org/abs/1804.04235, section 8): T5 does not divide attention scores by
sqrt(d_kv), so its queries are much smaller than its embeddings, and one rate for all would saturate
the attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.backend import cpu_only, mx, optimizers, tree_flatten, tree_unflatten
from mlx_t5.training.batches import TrainingBatch

Arrays = dict[str, mx.array]  # by name
# From weights, which the model has by then, and a batch: what to differentiate, and the loss summed
# over the tokens.
Loss = Callable[[Arrays, TrainingBatch], tuple[mx.array, mx.array]]
WARM_UP_SHARE = 0.05  # of the steps


@dataclass(frozen=True)
class State:
    """What a step changes.

    Attributes:
        weights: the parameters that are trained, by name, float32.
        moments: the optimiser's, by name.
        step: how many steps have been taken.
    """

    weights: Arrays
    moments: Arrays
    step: int = 0


class Learner:
    """Trains one model."""

    def __init__(
        self,
        model: Any,
        loss: Loss,
        iters: int,
        learning_rate: float,
        compiled: bool | None = None,
    ) -> None:
        """Prepares to train.

        Args:
            model: a `model.T5` in float32; its weights follow the state, see `put`.
            loss: of the model.
            iters: steps of the whole run.
            learning_rate: the largest, relative to a tensor's scale.
            compiled: whether to compile the steps; None does it on a GPU only.
        """
        self.model, self._loss = model, loss
        self.iters, self.learning_rate = iters, learning_rate
        self.optimizer = optimizers.Adafactor(
            learning_rate=learning_rate, relative_step=False, scale_parameter=True
        )
        compiled = not cpu_only() if compiled is None else compiled
        self._slopes = mx.compile(self._gradient) if compiled else self._gradient
        self._change = mx.compile(self._update) if compiled else self._update

    def begin(self) -> State:
        """The state before the first step."""
        parameters = tree_flatten(self.model.parameters())
        weights = {n: array for n, array in parameters if mx.issubdtype(array.dtype, mx.floating)}
        self.optimizer.init(tree_unflatten(list(weights.items())))
        return State(weights, dict(tree_flatten(self.optimizer.state)))

    def step(self, state: State, batch: Sequence[TrainingBatch]) -> tuple[State | None, float]:
        """Takes one step.

        Args:
            state: before it.
            batch: its micro-batches; the gradients of their tokens are added up.

        Returns:
            The state after it, None if the loss or a gradient is NaN or infinite; and the loss a
            token before it.
        """
        count = sum(mx.sum(micro_batch.counted) for micro_batch in batch)
        total, slopes = mx.array(0.0), dict[str, mx.array]()
        for micro_batch in batch:
            loss, more = self._slopes(state.weights, micro_batch.arrays)
            total = total + loss
            slopes = {n: slopes[n] + more[n] for n in more} if slopes else more
            mx.eval(total, slopes)  # one micro-batch's work is there at a time
        slopes = {name: slope / count for name, slope in slopes.items()}
        norm = mx.sqrt(sum(mx.sum(slope * slope) for slope in slopes.values()))
        if not mx.isfinite(total + norm).item():
            return None, math.nan
        rate = mx.array(self.learning_rate * self.schedule(state.step))
        weights, moments = self._change(state.weights, state.moments, slopes, rate)
        mean = total / count
        mx.eval(weights, moments, mean)
        return State(weights, moments, state.step + 1), mean.item()

    def put(self, weights: Arrays) -> None:
        """Gives the model these weights."""
        self.model.update(tree_unflatten(list(weights.items())))

    def schedule(self, step: int) -> float:
        """The share of the largest rate: a linear warm-up, then linear decay to nothing."""
        warm = (step + 1) / max(1.0, WARM_UP_SHARE * self.iters)
        decay = (self.iters - step) / max(1.0, (1 - WARM_UP_SHARE) * self.iters)
        return max(0.0, min(1.0, warm, decay))

    def loss(self, weights: Arrays, batch: TrainingBatch) -> tuple[mx.array, mx.array]:
        """What to differentiate, and the loss summed over the tokens."""
        self.put(weights)
        return self._loss(weights, batch)

    def _gradient(self, weights: Arrays, arrays: list[mx.array]) -> tuple[mx.array, Arrays]:
        """The loss, summed over the tokens of a micro-batch, and its gradient."""
        before = dict(tree_flatten(self.model.parameters()))
        try:
            batch = TrainingBatch.of(arrays)
            (_, loss), slopes = mx.value_and_grad(self.loss)(weights, batch)
        finally:
            self.put(before)  # no array that was only described stays there
        return loss, slopes

    def _update(
        self, weights: Arrays, moments: Arrays, slopes: Arrays, rate: mx.array
    ) -> tuple[Arrays, Arrays]:
        """The weights and moments after one step at this rate."""
        before = self.optimizer.state
        self.optimizer.state = tree_unflatten(list(moments.items())) | {"learning_rate": rate}
        try:
            trees = (tree_unflatten(list(arrays.items())) for arrays in (slopes, weights))
            changed = self.optimizer.apply_gradients(*trees)
            return dict(tree_flatten(changed)), dict(tree_flatten(self.optimizer.state))
        finally:
            self.optimizer.state = before  # no array that was only described stays there
