"""One loop for several ranks: rank 0 decodes, and what it asks of the target all of them compute.

Prompts, drafts, sampling, batches and requests are rank 0's alone, so no two ranks can decide
differently. `Leader` is the target as rank 0 sees it. Each call is told to the others by a message,
numbers that only the device knows go there in a collective, and all make the same pass of the same
shapes. A call begins to compute before it returns, as collectives have to come in one order.

Drafts are not shared out: a rank of a small model would wait for sums longer than it computes. One
that uses the target's encoder has the `Leader` for its target, so that it asks all ranks as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, nn
from mlx_t5.network.exact import Pass
from mlx_t5.network.exactness import holding_rows
from mlx_t5.network.interface import Seq2Seq
from mlx_t5.network.memory import clear_large_cache, wire
from mlx_t5.network.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from mlx_t5.machines.team import Team

Tell = Callable[[list[Any]], None]
Shared = tuple[Any, Callable[[Any], Any]]  # a group, and what becomes of rank 0's part of the model


def leading(team: Team | None) -> Shared | None:
    """How rank 0 loads the target, see `cli.models.load_pair`; None for a process alone."""
    return None if team is None else (team.group, lambda model: Leader(model, team.tell))


class Leader:
    """The target of rank 0; see `interface.Seq2Seq` for its methods.

    Attributes:
        ranks: that make the calls which this one makes: it alone.
    """

    def __init__(self, model: Any, tell: Tell) -> None:
        """Wraps a model.

        Args:
            model: this rank's part of the target.
            tell: sends a message to all other ranks.
        """
        self.model, self.ranks, self._sharing = model, ALONE, model.ranks
        self.config, self.dtype = model.config, model.dtype
        self.pooling, self.can_decode = model.pooling, model.can_decode
        self.shared, self.encoder = model.shared, model.encoder  # see `sharing.share`
        self._tell_all, self._names = tell, count()
        self._dropped: list[int] = []  # caches that nobody here knows any longer

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        """The encoder's output (B, S, d_model)."""
        self.tell("encode", ids.shape, mask is not None)
        return _begun(self.model.encode(*_sent(self._sharing, ids, mask)))

    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Any:
        """A decoder's cache for encoded prompts, of which every rank has its heads."""
        name = next(self._names)
        self.tell("cache", name, encoded.shape, mask is not None, capacity)
        encoded, mask = _sent(self._sharing, encoded, mask)
        inner = self.model.cache(encoded, mask, capacity)
        mx.async_eval(inner.state)
        return LedCache(self, inner, name)

    def decode(
        self, tokens: mx.array, cache: Any, offsets: list[int] | mx.array, traced: bool = False
    ) -> mx.array:
        """float32 logits (B, T, V) of the token after each of `tokens` (B, T)."""
        assert isinstance(offsets, list), "they are told in a message"
        if isinstance(cache, Pass):
            rows: list[Any] = list(cache.rows)
            self.tell("decode_rows", [row.name for row in rows], tokens.shape, offsets)
            inner: Any = Pass([row.inner for row in rows], cache.batch)
        else:
            self.tell("decode", cache.name, tokens.shape, offsets)
            inner = cache.inner
        (tokens,) = _sent(self._sharing, tokens.astype(mx.int32))
        return _begun(self.model.decode(tokens, inner, offsets))

    def holding_rows(self, batch: int, width: int) -> list[int]:
        """See `exactness.holding_rows`."""
        self.tell("hold", batch, width)
        return holding_rows(self.model, batch, width)

    def whole_head(self) -> nn.Module | None:
        """See `T5.whole_head`; rank 0 reads it by itself."""
        return self.model.whole_head()

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        """Bytes of a rank's part of the cache."""
        return self.model.cache_memory(prompts, source, target, rows)

    def encoder_memory(self, rows: int, source: int) -> int:
        """Bytes that encoding takes a rank."""
        return self.model.encoder_memory(rows, source)

    def tell(self, verb: str, *arguments: Any) -> None:
        """Tells all other ranks what comes next."""
        if self._dropped:
            dropped, self._dropped[:] = list(self._dropped), []
            self._tell_all(["drop", dropped])
        self._tell_all([verb, *arguments])

    def adopt(self, cache: LedCache) -> None:
        """Has the other ranks drop a cache when it is collected here."""
        weakref.finalize(cache, self._dropped.append, cache.name).atexit = False

    def next_name(self) -> int:
        """The number of a new cache."""
        return next(self._names)


class LedCache:
    """A cache of rank 0 whose verbs every rank follows; what is read of it is this rank's."""

    VERBS = ("keep", "fan_out", "reorder", "trim", "reserve")

    def __init__(self, leader: Leader, inner: Any, name: int) -> None:
        """Stands for this rank's part of a cache, which the others know by its number."""
        self._leader, self.inner, self.name = leader, inner, name
        leader.adopt(self)

    def __getattr__(self, name: str) -> Any:
        if name not in self.VERBS:
            return getattr(self.inner, name)

        def act(*arguments: Any) -> None:
            if name != "reserve" or arguments[0] > getattr(self.inner, "capacity", 0):
                plain = [list(a) if isinstance(a, Sequence) else a for a in arguments]
                self._leader.tell("change", self.name, name, *plain)
                getattr(self.inner, name)(*arguments)

        return act

    def append(self, other: LedCache) -> None:
        """Adds the prompts of `other` at the end."""
        self._leader.tell("append", self.name, other.name)
        self.inner.append(other.inner)

    def shared(self, copies: int, capacity: int) -> LedCache:
        """Another cache of the same prompts, with `copies` empty rows of each."""
        name = self._leader.next_name()
        self._leader.tell("share", self.name, name, copies, capacity)
        return LedCache(self._leader, self.inner.shared(copies, capacity), name)

    def twin(self) -> LedCache:
        """A copy of the cache."""
        name = self._leader.next_name()
        self._leader.tell("twin", self.name, name)
        return LedCache(self._leader, self.inner.twin(), name)


class Follower:
    """Another rank: does what rank 0 tells, until the process ends."""

    def __init__(self, model: Seq2Seq) -> None:
        """Takes this rank's part of the target."""
        assert model.ranks.size > 1, "a whole model would wait for nobody"
        self.model, self.ranks, self._caches = model, model.ranks, dict[int, Any]()

    def do(self, verb: str, *arguments: Any) -> None:
        """Does what one message says."""
        getattr(self, f"_{verb}")(*arguments)

    def _encode(self, shape: list[int], masked: bool) -> None:
        mask = mx.zeros(shape, mx.bool_) if masked else None
        _begun(self.model.encode(*_sent(self.ranks, mx.zeros(shape, mx.int32), mask)))

    def _cache(self, name: int, shape: list[int], masked: bool, capacity: int) -> None:
        prompts, source, _ = shape
        mask = mx.zeros((prompts, source), mx.bool_) if masked else None
        wire(self.model.cache_memory(prompts, source, capacity))
        states, mask = _sent(self.ranks, mx.zeros(shape, self.model.dtype), mask)
        self._caches[name] = self.model.cache(states, mask, capacity)
        mx.async_eval(self._caches[name].state)
        clear_large_cache()

    def _decode(self, name: int, shape: list[int], offsets: list[int]) -> None:
        self._decode_with(self._caches[name], shape, offsets)

    def _decode_rows(self, names: list[int], shape: list[int], offsets: list[int]) -> None:
        self._decode_with(Pass([self._caches[name] for name in names], shape[0]), shape, offsets)

    def _decode_with(self, cache: Any, shape: list[int], offsets: list[int]) -> None:
        (tokens,) = _sent(self.ranks, mx.zeros(shape, mx.int32))
        _begun(self.model.decode(tokens, cache, offsets))

    def _hold(self, batch: int, width: int) -> None:
        holding_rows(self.model, batch, width)

    def _change(self, name: int, verb: str, *arguments: Any) -> None:
        assert verb in LedCache.VERBS
        getattr(self._caches[name], verb)(*arguments)

    def _append(self, name: int, other: int) -> None:
        self._caches[name].append(self._caches[other])

    def _share(self, name: int, new: int, copies: int, capacity: int) -> None:
        self._caches[new] = self._caches[name].shared(copies, capacity)

    def _twin(self, name: int, new: int) -> None:
        self._caches[new] = self._caches[name].twin()

    def _drop(self, names: list[int]) -> None:
        for name in names:
            del self._caches[name]


def _sent(ranks: Ranks, *arrays: mx.array | None) -> list[Any]:
    """What rank 0 has in the place of each array."""
    return [None if array is None else ranks.of_first(array) for array in arrays]


def _begun(array: mx.array) -> mx.array:
    mx.async_eval(array)
    return array
