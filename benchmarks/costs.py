"""What passes cost here, by measurement: c and v(M), and the weights that a pass reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.drafting.costs import chain
from mlx_t5.network.cache import Cache
from mlx_t5.network.compiled import CompiledStep
from model import T5

OFFSET = 16  # target position at which passes are measured: the middle of a sentence
MEASURED_POSITIONS = 16  # v(M) is measured up to here at least, which is what auto uses at most


@dataclass(frozen=True)
class Round:
    """One measurement of everything.

    Attributes:
        target: M → seconds of a target pass over M positions, its choice of tokens included.
        draft: seconds of a draft pass.
    """

    target: dict[int, float]
    draft: float


@dataclass(frozen=True)
class PairCosts:
    """Medians over rounds.

    Attributes:
        seconds: M → seconds of a target pass.
        v: the same in units of that over one position.
        c: a draft pass in the same unit.
    """

    seconds: dict[int, float]
    v: dict[int, float]
    c: float

    @classmethod
    def from_rounds(cls, rounds: Sequence[Round]) -> PairCosts:
        """The medians of these rounds."""
        widths = rounds[0].target
        seconds = {m: statistics.median(each.target[m] for each in rounds) for m in widths}
        draft = statistics.median(each.draft for each in rounds)
        return cls(seconds, {m: s / seconds[1] for m, s in seconds.items()}, draft / seconds[1])


class CostMeter:
    """Measures passes over one row whose source has a given length."""

    def __init__(
        self,
        target: T5,
        draft: T5,
        source: int,
        num_draft: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepares both models.

        Args:
            target: the model that verifies.
            draft: the model that proposes.
            source: source tokens of the row.
            num_draft: the most proposals of a step, if that is more than `MEASURED_POSITIONS` - 1.
            clock: seconds.
        """
        self.target, self.step, self.clock = target, CompiledStep(draft), clock
        self.longest = max(MEASURED_POSITIONS, num_draft + 1)
        self.target_cache, self.draft_cache = (
            self._cache(model, source) for model in (target, draft)
        )

    def measure(self) -> Round:
        """Measures every pass once."""
        target = {m: self.target_seconds(m) for m in range(1, self.longest + 1)}
        return Round(target, self.draft_seconds())

    def target_seconds(self, width: int) -> float:
        """Seconds of a target pass over so many positions."""
        tokens = mx.zeros((1, width), mx.int32)
        mx.eval(tokens)
        began = self.clock()
        logits = self.target.decode(tokens, self.target_cache, [OFFSET])
        mx.eval(mx.argmax(logits, axis=-1))
        return self.clock() - began

    def draft_seconds(self) -> float:
        """Seconds of a draft pass over one position, in a chain of them."""
        return chain(self.step, mx.zeros((1, 1), mx.int32), self.draft_cache, OFFSET, self.clock)

    def _cache(self, model: T5, source: int) -> Cache:
        slots = OFFSET + self.longest
        cache = model.cache(model.encode(mx.zeros((1, source), mx.int32)), capacity=slots)
        mx.eval(cache.state)
        return cache


def weights_read(model: T5) -> int:
    """Bytes of weights that one pass of the decoder reads.

    That is the decoder without the keys and values of its cross-attention, which are computed once
    a prompt, and the output head: the whole embedding where that is the head.
    """
    arrays = tree_flatten(model.parameters())
    head = "lm_head." if any(name.startswith("lm_head.") for name, _ in arrays) else "shared."
    once = (".cross_attention.k.", ".cross_attention.v.")
    return sum(
        array.nbytes
        for name, array in arrays
        if name.startswith(head)
        or (name.startswith("decoder.") and not any(part in name for part in once))
    )
