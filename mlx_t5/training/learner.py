"""Takes training steps: computes the gradient of the loss and updates the weights.

A step returns a new state and does not change the old state, so an interruption leaves a complete
state.

A step trains the parameters that are not frozen and not shared with another model. So if a draft
shares the target's encoder, embedding and head, only the draft's decoder is trained. Parameters of
whole numbers, such as the table of ids in a draft with its own vocabulary, are never trained.

The default optimizer is Adafactor (Shazeer and Stern, https://arxiv.org/abs/1804.04235), with which
T5 was trained. Adafactor multiplies the learning rate by the scale of each tensor (section 8).
T5 does not divide attention scores by sqrt(d_kv), so its query weights are much smaller than its
embeddings. Without the scale, a rate that suits the embeddings would change the query weights too
much, and the attention would saturate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.backend import cpu_only, mx, optimizers, tree_flatten, tree_unflatten
from mlx_t5.model import T5
from mlx_t5.training.batches import TrainingBatch

Arrays = dict[str, mx.array]  # by name
# A function of the model's weights and a batch. It returns two scalars (see loss.py): a surrogate,
# whose gradient is the gradient of the loss, and the loss itself, summed over the tokens.
Loss = Callable[[Arrays, TrainingBatch], tuple[mx.array, mx.array]]
WARM_UP_SHARE = 0.05  # share of the steps that are warm-up by default


@dataclass(frozen=True)
class State:
    """Weights (float32) and optimizer arrays by name, after a number of steps."""

    weights: Arrays
    moments: Arrays
    step: int = 0


class Learner:
    """Trains one model."""

    def __init__(
        self,
        model: T5,
        loss: Loss,
        iters: int,
        learning_rate: float,
        compiled: bool | None = None,
        schedule: Callable[[int], float] | None = None,
        optimizer: Any = None,
        drop: Callable[[mx.array | None], None] | None = None,
        seed: int = 0,
        max_grad_norm: float = math.inf,
        weight_decay: float = 0.0,
    ) -> None:
        """Prepares to train.

        Args:
            model: its trained parameters are in float32.
            loss: the model's loss.
            iters: number of steps in the whole run.
            learning_rate: the largest rate; with Adafactor it is relative to a tensor's scale.
            compiled: whether to compile the steps; None compiles on a GPU only.
            schedule: the rate at a step as a share of `learning_rate`; None is `linear`.
            optimizer: an optimizer of `mlx.optimizers`; None is Adafactor.
            drop: sets the model's dropout; called with a random key before each micro-batch,
                and with None after it.
            seed: the seed of the dropout.
            max_grad_norm: a gradient with a larger norm is scaled down to this norm.
            weight_decay: subtracts this share of the weights times the rate in each step, except
                from norms and relative biases, as transformers' Trainer does.
        """
        self.model, self._loss = model, loss
        self.learning_rate = learning_rate
        self.schedule = schedule or linear(iters, WARM_UP_SHARE * iters)
        self.optimizer = optimizer or adafactor()
        self._drop, self._seed = drop, seed
        self.max_grad_norm, self.weight_decay = max_grad_norm, weight_decay
        compiled = not cpu_only() if compiled is None else compiled
        self._gradient_of: Callable = mx.compile(self._gradient) if compiled else self._gradient
        self._updated: Callable = mx.compile(self._update) if compiled else self._update

    def initial_state(self) -> State:
        parameters = tree_flatten(self.model.trainable_parameters())
        weights = {n: array for n, array in parameters if mx.issubdtype(array.dtype, mx.floating)}
        self.optimizer.init(tree_unflatten(list(weights.items())))
        return State(weights, dict(tree_flatten(self.optimizer.state)))

    def step(self, state: State, batch: Sequence[TrainingBatch]) -> tuple[State | None, float]:
        """Takes one step on micro-batches; returns the state and the mean loss before it.

        If the loss or a gradient is NaN or infinite, the state is None and the loss is NaN.
        """
        total, grads = mx.array(0.0), dict[str, mx.array]()
        for i, micro_batch in enumerate(batch):
            # The key depends on the step alone, so that a resumed run has it too.
            rng = random.Random(f"dropout {self._seed} {state.step} {i}")
            key = mx.random.key(rng.getrandbits(64))
            loss, more = self._gradient_of(state.weights, micro_batch.arrays, key)
            total = total + loss
            grads = {name: grads[name] + more[name] for name in more} if grads else more
            mx.eval(total, grads)  # so that memory holds only one micro-batch's activations
        count = sum(mx.sum(micro_batch.counted) for micro_batch in batch)
        grads = {name: grad / count for name, grad in grads.items()}
        grads, norm = optimizers.clip_grad_norm(grads, self.max_grad_norm)
        if not mx.isfinite(total + norm).item():
            return None, math.nan
        rate = mx.array(self.rate(state.step))
        weights, moments = self._updated(state.weights, state.moments, grads, rate)
        mean = total / count
        mx.eval(weights, moments, mean)
        return State(weights, moments, state.step + 1), mean.item()

    def rate(self, step: int) -> float:
        if getattr(self.optimizer, "relative_step", False):
            return min(1e-2, (step + 1) ** -0.5)
        return self.learning_rate * self.schedule(step)

    def held_out_loss(self, batches: Iterable[TrainingBatch]) -> float:
        """The mean loss per token of the model's present weights."""
        total, count = 0.0, 0.0
        for micro_batch in batches:
            total += self._loss({}, micro_batch)[1].item()
            count += mx.sum(micro_batch.counted).item()
        return total / count

    def update_model(self, weights: Arrays) -> None:
        self.model.update(tree_unflatten(list(weights.items())))

    def _gradient(
        self, weights: Arrays, arrays: list[mx.array | None], key: mx.array | None = None
    ) -> tuple[mx.array, Arrays]:
        before = dict(tree_flatten(self.model.parameters()))
        batch = TrainingBatch(*arrays)

        def surrogate_and_loss(weights: Arrays) -> tuple[mx.array, mx.array]:
            self.update_model(weights)
            return self._loss(weights, batch)

        try:
            if self._drop:
                self._drop(key)
            (_, loss), grads = mx.value_and_grad(surrogate_and_loss)(weights)
        finally:
            if self._drop:
                self._drop(None)
            self.update_model(before)  # so that no unevaluated (traced) array stays in the model
        return loss, grads

    def _update(
        self, weights: Arrays, moments: Arrays, grads: Arrays, rate: mx.array
    ) -> tuple[Arrays, Arrays]:
        before = self.optimizer.state
        self.optimizer.state = tree_unflatten(list(moments.items())) | {"learning_rate": rate}
        try:
            grads, tree = tree_unflatten(list(grads.items())), tree_unflatten(list(weights.items()))
            changed = dict(tree_flatten(self.optimizer.apply_gradients(grads, tree)))
            decayed = [name for name in weights if "norm" not in name and "bias" not in name]
            for name in decayed if self.weight_decay else ():
                decay = rate * self.weight_decay
                if isinstance(self.optimizer, optimizers.Adafactor):
                    # As in the optimizer, the rate is relative to the tensor's scale.
                    decay = decay * mx.maximum(1e-3, mx.sqrt(mx.mean(weights[name] ** 2)))
                changed[name] = changed[name] - decay * weights[name]
            return changed, dict(tree_flatten(self.optimizer.state))
        finally:
            self.optimizer.state = before  # so that no unevaluated array stays there


def adafactor(relative_step: bool = False) -> Any:
    """Adafactor with transformers' hyperparameters; `relative_step` ignores the schedule."""
    return optimizers.Adafactor(learning_rate=1.0, relative_step=relative_step)


def adamw() -> Any:
    """AdamW as in PyTorch (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    The learner decays the weights.
    """
    return optimizers.AdamW(1.0, weight_decay=0.0, bias_correction=True)


def linear(iters: int, warm_up: float) -> Callable[[int], float]:
    """Linear warm-up, then linear decay to 0."""

    def share(step: int) -> float:
        decay = (iters - step) / max(1.0, iters - warm_up)
        return max(0.0, min(1.0, (step + 1) / max(1.0, warm_up), decay))

    return share


def constant(warm_up: float) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / max(1.0, warm_up))
