"""Keys and values that a T5 decoder keeps for a batch whose rows have different lengths.

T5 has no rotary positions, so a token's slot in the cache is its absolute position, and the
distance `key - query` alone decides what attention may see. Feeding a position again overwrites
its slot; rolling back means feeding from an earlier position. Hence the cache knows no lengths:
the caller keeps each row's offset, the position of its next token.

Several rows may continue one prompt, as beams do: adjacent rows, as many for every prompt, that
share its cross-attention.

Shapes: B rows, P prompts, K = B / P rows per prompt, H heads, N slots (capacity), S source
positions, T new positions. Self-attention is (B, H, N, d_kv), cross-attention (P, H, S, d_kv).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np

from mlx_t5.backend import ON_CUDA, cpu_only, mx
from mlx_t5.network.bias import hiding

SLOT_MULTIPLE = 32  # slots are added, and attended to, in multiples of this; see `round_up`
ADDS_MASKS = ON_CUDA or cpu_only()  # where attention takes no bool masks, see model.attention
FEW_SHAPES = not cpu_only()  # a GPU needs time to prepare for each new shape
NO_QUERIES = np.empty((0, 0), np.int32)
KeysValues: TypeAlias = tuple[mx.array, mx.array]
Attend: TypeAlias = Callable[..., mx.array]  # model.attention


def round_up(n: int) -> int:
    """Rounds n positions up to a multiple of 32; on a GPU, up to 32 times a power of two."""
    multiples = -(-max(n, 1) // SLOT_MULTIPLE)
    return SLOT_MULTIPLE * (1 << (multiples - 1).bit_length() if FEW_SHAPES else multiples)


def source_width(longest: int, rows: int = 2) -> int:
    """The padded source length S for `rows` rows of at most `longest` tokens."""
    # On a GPU a multiple of 32: with fewer shapes, the work make_cache for a shape (`mx.compile`,
    # CUDA's graphs) is reused more often. And Metal has one kernel for attention with few queries,
    # but uses it only if S is at least their number.
    if not FEW_SHAPES or (rows == 1 and ON_CUDA):  # CUDA attends to one row faster without a mask
        return longest
    return -(-longest // 32) * 32


@dataclass(frozen=True)
class Slots:
    """The slots that one forward pass of the decoder writes to and attends to."""

    keys: list[mx.array]  # one per layer, updated in place; empty if nothing is kept
    values: list[mx.array]
    positions: mx.array  # (B, T) absolute positions; (1, T) if equal in all rows
    queries: np.ndarray  # the same, outside of the device; unknown (NO_QUERIES) to a compiled layer
    start: int | None  # the first position if it is the same in all rows
    seen: int  # number of slots, counted from slot 0, that attention reads
    batch: int
    prompts: int
    cross: list[KeysValues]  # one pair per layer
    mask: mx.array | None  # hides padding of sources: (P, H, K·T, S), or (1, 1, 1, S) if P = 1

    def self_attention(
        self, attend: Attend, layer: int, q: mx.array, k: mx.array, v: mx.array, bias: mx.array
    ) -> mx.array:
        """Writes a layer's new keys and values (B, H, T, d_kv), then attends to all slots."""
        if not self.keys:
            return attend(q, k, v, bias)
        # Lazy, and without a copy if nothing else refers to the arrays.
        if self.start is None:
            index = mx.broadcast_to(self.positions[:, None, :, None], k.shape)
        for arrays, new in ((self.keys, k), (self.values, v)):
            if self.start is None:
                arrays[layer] = mx.put_along_axis(arrays[layer], index, new, axis=2)
            else:
                arrays[layer][:, :, self.start : self.start + k.shape[2]] = new
        seen = slice(self.seen)
        return attend(q, self.keys[layer][:, :, seen], self.values[layer][:, :, seen], bias)

    def cross_attention(self, attend: Attend, layer: int, q: mx.array) -> mx.array:
        """Attends to the source with queries (P, H, K·T, d_kv)."""
        return attend(q, *self.cross[layer], self.mask)


class Cache:
    """Keys and values of a decoder's cross-attention and self-attention, for P prompts; lazy."""

    def __init__(
        self, cross: list[KeysValues], mask: mx.array | None, capacity: int, beams: int = 1
    ):
        prompts, heads, _, width = cross[0][0].shape
        empty = (prompts * beams, heads, round_up(capacity), width)
        self.cross, self.beams = cross, beams  # per layer; number of rows per prompt K
        self.mask = None if mask is None else mask.astype(mx.bool_)  # (P, S), False: padding
        self.keys = [mx.zeros(empty, k.dtype) for k, _ in cross]
        self.values = [mx.zeros(empty, v.dtype) for _, v in cross]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def prompts(self) -> int:
        return self.cross[0][0].shape[0]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @property
    def source(self) -> int:
        return self.cross[0][0].shape[2]

    @property
    def state(self) -> list[mx.array]:
        mask = [] if self.mask is None else [self.mask]
        return [*self.keys, *self.values, *chain(*self.cross), *mask]

    def slots(self, offsets: list[int], length: int) -> Slots:
        """Returns the slots for `length` tokens a row from `offsets` on; adds slots if needed."""
        batch, heads, capacity, _ = self.keys[0].shape
        prompts, _, source, _ = self.cross[0][0].shape
        if len(offsets) != batch or min(offsets) < 0:
            raise ValueError(f"offsets {offsets} do not fit a cache of {batch} rows")
        end = max(offsets) + length
        if end > capacity:
            self.reserve(end)
        start = offsets[0] if len(set(offsets)) == 1 else None
        first = offsets if start is None else offsets[:1]
        queries = np.array([range(offset, offset + length) for offset in first], np.int32)
        mask = None if self.mask is None else self.mask[:, None, None]
        if mask is not None and ADDS_MASKS:
            mask = hiding(mask, self.keys[0].dtype)
        if mask is not None and prompts > 1:  # broadcast once, or attention does so in every layer
            shape = prompts, heads, self.beams * length, source
            mask = mx.contiguous(mx.broadcast_to(mask, shape))
        arrays, seen = (self.keys, self.values), round_up(end)
        positions = mx.array(queries)
        return Slots(*arrays, positions, queries, start, seen, batch, prompts, self.cross, mask)

    def whole(self, length: int) -> Slots:
        """Returns slots for whole texts of `length` tokens, of which nothing is kept (training)."""
        return replace(self.slots([0] * self.batch, length), keys=[], values=[], seen=length)

    def shared(self, beams: int, capacity: int) -> Cache:
        """Returns a cache with the same cross-attention and `beams` empty rows per prompt."""
        return Cache(self.cross, self.mask, capacity, beams)

    def twin(self) -> Cache:
        """Returns a copy that shares the cross-attention; only for one row per prompt."""
        twin = self.shared(1, 1)
        twin.keys, twin.values = list(map(mx.array, self.keys)), list(map(mx.array, self.values))
        return twin

    def reserve(self, capacity: int) -> None:
        """Grows to at least `capacity` slots and keeps their content."""
        if capacity > self.keys[0].shape[2]:
            capacity = round_up(capacity)
            self.keys = [_widened(a, capacity) for a in self.keys]
            self.values = [_widened(a, capacity) for a in self.values]

    def filter(self, prompts: Sequence[int]) -> None:
        """Keeps only these prompts and their rows, in this order; a prompt may be repeated."""
        if list(prompts) == list(range(self.prompts)):
            return
        self.reorder([p * self.beams + k for p in prompts for k in range(self.beams)])
        index = mx.array(prompts, dtype=mx.int32)
        self.cross = [(k[index], v[index]) for k, v in self.cross]
        if self.mask is not None:
            self.mask = self.mask[index]

    def reorder(self, rows: Sequence[int]) -> None:
        """Replaces each row i by a copy of row rows[i], which must continue the same prompt."""
        if list(rows) == list(range(self.batch)):
            return
        index = mx.array(rows, dtype=mx.int32)
        self.keys = [a[index] for a in self.keys]
        self.values = [a[index] for a in self.values]

    def trim(self, source: int, capacity: int) -> None:
        """Frees source positions beyond `source` if they are at least half; slots likewise."""
        source = source_width(source)
        if 2 * source <= self.source:
            self.cross = [(_narrowed(k, source), _narrowed(v, source)) for k, v in self.cross]
            self.mask = None if self.mask is None else self.mask[:, :source]
        capacity = round_up(capacity)
        if 2 * capacity <= self.capacity:
            self.keys = [_narrowed(a, capacity) for a in self.keys]
            self.values = [_narrowed(a, capacity) for a in self.values]

    def extend(self, other: Cache) -> None:
        """Adds the prompts of `other`, which has the same `beams`; pads shorter arrays."""
        capacity = max(self.capacity, other.capacity)
        source = max(self.source, other.source)
        if self.mask is not None or other.mask is not None or self.source != other.source:
            self.mask = mx.concatenate([self._wide_mask(source), other._wide_mask(source)])
        pairs = zip(self.values, other.values, strict=True)
        self.keys = [_joined(a, b, capacity) for a, b in zip(self.keys, other.keys, strict=True)]
        self.values = [_joined(a, b, capacity) for a, b in pairs]
        self.cross = [
            (_joined(k, more_k, source), _joined(v, more_v, source))
            for (k, v), (more_k, more_v) in zip(self.cross, other.cross, strict=True)
        ]

    def _wide_mask(self, source: int) -> mx.array:
        mask = mx.ones((self.prompts, self.source), mx.bool_) if self.mask is None else self.mask
        return mx.pad(mask, ((0, 0), (0, source - self.source)))


def _narrowed(array: mx.array, length: int) -> mx.array:
    return mx.contiguous(array[:, :, :length])  # a view would free no memory


def _joined(one: mx.array, other: mx.array, length: int) -> mx.array:
    return mx.concatenate([_widened(one, length), _widened(other, length)])


def _widened(array: mx.array, length: int) -> mx.array:
    missing = length - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else array
