"""One step of training a draft: the loss, its gradient and the update, as functions of the state.

The state is what a step changes. A step returns a new one and leaves the old one alone, so whatever
interrupts it leaves a state that is whole.

All parameters that the draft has of its own are trained. Of a draft that shares the target's
encoder, embedding and head these are its decoder's.

Rates follow the scale of each tensor, as Adafactor's do with which T5 was trained (Shazeer and
Stern, https://arxiv.org/abs/1804.04235, section 8): T5 does not divide attention scores by
sqrt(d_kv), so its queries are much smaller than its embeddings, and one rate for all would saturate
the attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_t5.backend import cpu_only, mx, optimizers, tree_flatten, tree_unflatten
from mlx_t5.network.linear import product
from mlx_t5.training.batches import Batch
from mlx_t5.training.loss import divergence

Arrays = dict[str, mx.array]  # by name
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
    """Trains one draft."""

    def __init__(
        self,
        draft: Any,
        iters: int,
        learning_rate: float,
        temp: float = 0.0,
        compiled: bool | None = None,
    ) -> None:
        """Prepares to train.

        Args:
            draft: a `model.T5` in float32; its weights follow the state, see `put`.
            iters: steps of the whole run.
            learning_rate: the largest, relative to a tensor's scale.
            temp: temperature at which the target is sampled; 0 is greedy.
            compiled: whether to compile the steps; None does it on a GPU only.
        """
        self.draft, self.iters, self.learning_rate, self.temp = draft, iters, learning_rate, temp
        self.optimizer = optimizers.Adafactor(
            learning_rate=learning_rate, relative_step=False, scale_parameter=True
        )
        compiled = not cpu_only() if compiled is None else compiled
        self._slopes = mx.compile(self._gradient) if compiled else self._gradient
        self._change = mx.compile(self._update) if compiled else self._update

    def begin(self) -> State:
        """The state before the first step."""
        weights = dict(tree_flatten(self.draft.parameters()))
        self.optimizer.init(tree_unflatten(list(weights.items())))
        return State(weights, dict(tree_flatten(self.optimizer.state)))

    def step(self, state: State, batch: Sequence[Batch]) -> tuple[State | None, float]:
        """Takes one step.

        Args:
            state: before it.
            batch: its parts; the gradients of their tokens are added up.

        Returns:
            The state after it, None if the loss or a gradient is NaN or infinite; and the loss a
            token before it.
        """
        count = sum(mx.sum(part.counted) for part in batch)
        total, slopes = mx.array(0.0), dict[str, mx.array]()
        for part in batch:
            loss, more = self._slopes(state.weights, part.arrays)
            total = total + loss
            slopes = {n: slopes[n] + more[n] for n in more} if slopes else more
            mx.eval(total, slopes)  # one part's work is there at a time
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
        """Gives the draft these weights."""
        self.draft.update(tree_unflatten(list(weights.items())))

    def schedule(self, step: int) -> float:
        """The share of the largest rate: a linear warm-up, then linear decay to nothing."""
        warm = (step + 1) / max(1.0, WARM_UP_SHARE * self.iters)
        left = (self.iters - step) / max(1.0, (1 - WARM_UP_SHARE) * self.iters)
        return max(0.0, min(1.0, warm, left))

    def loss(self, weights: Arrays, batch: Batch) -> tuple[mx.array, mx.array]:
        """What to differentiate, and the loss summed over the tokens; see `divergence`."""
        draft, rows = self.draft, batch.tokens.shape[0]
        self.put(weights)
        if batch.states is None:
            encoded = draft.encode(batch.source, batch.mask)
        else:
            encoded = batch.states.astype(mx.float32)
        cache = draft.cache(encoded, batch.mask, capacity=batch.tokens.shape[1])
        states = draft.decoder_states(batch.tokens, cache, [0] * rows, traced=True)
        names = ("lm_head.weight", "shared.weight")
        head = [weights[name] for name in names if name in weights][:1]

        def logits(states: mx.array, *weight: mx.array) -> mx.array:
            own = (lambda x: product(x, weight[0])) if weight else None
            return draft.logits(states, own)

        return divergence(
            logits, states, head, batch.top_ids, batch.top_p, batch.counted, self.temp or 1.0
        )

    def _gradient(self, weights: Arrays, arrays: list[mx.array]) -> tuple[mx.array, Arrays]:
        """The loss, summed over the tokens of a part, and its gradient."""
        before = dict(tree_flatten(self.draft.parameters()))
        try:
            (_, loss), slopes = mx.value_and_grad(self.loss)(weights, Batch.of(arrays))
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
            trees = (tree_unflatten(list(each.items())) for each in (slopes, weights))
            changed = self.optimizer.apply_gradients(*trees)
            return dict(tree_flatten(changed)), dict(tree_flatten(self.optimizer.state))
        finally:
            self.optimizer.state = before  # no array that was only described stays there
