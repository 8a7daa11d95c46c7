"""What passes cost here, by measurement: c, v(M), the weights they read, the memory's bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backend import mx, tree_flatten
from cache import Cache
from model import T5

OFFSET = 16  # target position at which passes are measured: the middle of a sentence
PLACES = (16, 128, 256, 384, 511)  # tokens already generated, where time per token is compared
COPIED = 2**28  # bytes of the array that is copied: far more than any cache holds
COPIES = 8  # in a row, so that starting them does not count


@dataclass(frozen=True)
class Round:
    """One measurement of everything.

    Attributes:
        target: M → seconds of a target pass over M positions, its choice of tokens included.
        draft: gamma → seconds of a draft pass where so many follow each other in a step.
        places: tokens already generated → seconds of a target pass over the next one.
    """

    target: dict[int, float]
    draft: dict[int, float]
    places: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """Medians over rounds.

    Attributes:
        seconds: M → seconds of a target pass.
        v: the same in units of that over one position.
        c: gamma → a draft pass in the same unit.
        places: tokens already generated → seconds of a target pass over the next one.
    """

    seconds: dict[int, float]
    v: dict[int, float]
    c: dict[int, float]
    places: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Costs:
        """The medians of these rounds."""
        seconds = _medians([each.target for each in rounds])
        draft = _medians([each.draft for each in rounds])
        v, c = ({n: s / seconds[1] for n, s in each.items()} for each in (seconds, draft))
        return cls(seconds, v, c, _medians([each.places for each in rounds]))


def _medians(rows: Sequence[dict[int, float]]) -> dict[int, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


class CostMeter:
    """Measures passes over one row whose source has a given length."""

    def __init__(
        self,
        target: T5,
        draft: T5,
        source: int,
        longest: int,
        chains: Sequence[int],
        places: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepares both models.

        Args:
            target: the model that verifies.
            draft: the model that proposes.
            source: source tokens of the row.
            longest: the largest M.
            chains: numbers of draft passes in a row, as nothing waits for the device while
                drafting.
            places: tokens already generated, made up, at which to measure as well.
            clock: seconds.
        """
        self.models = target, draft
        slots = max([OFFSET + max(longest, *chains), *(place + 1 for place in places)])
        self.caches = [self._cache(model, source, slots) for model in self.models]
        self.longest, self.chains, self.places, self.clock = longest, chains, places, clock

    def measure(self) -> Round:
        """Measures every pass once."""
        target = {width: self._seconds(0, width, 1) for width in range(1, self.longest + 1)}
        draft = {gamma: self._seconds(1, 1, gamma) / gamma for gamma in self.chains}
        places = {place: self._seconds(0, 1, 1, place) for place in self.places}
        return Round(target, draft, places)

    def _seconds(self, which: int, width: int, passes: int, offset: int = OFFSET) -> float:
        model, cache = self.models[which], self.caches[which]
        tokens = mx.zeros((1, width), mx.int32)
        mx.eval(tokens)
        began = self.clock()
        for i in range(passes):
            logits = model.decode(tokens, cache, [offset + i])
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        mx.eval(tokens)
        return self.clock() - began

    def _cache(self, model: T5, source: int, slots: int) -> Cache:
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


def copy_bandwidth(
    repeats: int = 3, size: int = COPIED, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Bytes a second, read and written, of an operation on a large array, several times."""
    array = mx.zeros((size // 4,), mx.float32)
    mx.eval(array)
    results = []
    for _ in range(repeats + 1):
        began, copy = clock(), array
        for _ in range(COPIES):
            copy = copy + 1
        mx.eval(copy)
        results.append(2 * size * COPIES / (clock() - began))
    return results[1:]  # the first also had to ask for the memory
