"""Keys and values that a T5 decoder keeps for a batch whose rows are of different lengths.

T5 has no rotary positions, so a row's slot in the cache is simply the absolute position of the
token, and what attention may see follows from the distance `key - query` alone. Feeding a
position again overwrites its slot; rolling back is feeding from an earlier position. Hence the
cache knows no lengths: whoever decodes owns the offsets.

Several rows may continue one prompt, as many of each, as beams do. They lie side by side, and what
belongs to the prompt is held once.

Shapes: B rows, P prompts, K = B / P rows of each, H heads, N slots (capacity), S source positions,
T new positions. Self-attention arrays are (B, H, N, d_kv), cross-attention arrays (P, H, S, d_kv).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_t5.backend import cpu_only, mx

BLOCK = 32  # slots are added, and attended to, in multiples of this


def round_up(n: int) -> int:
    """The number of slots, a multiple of the block, that holds n positions."""
    return -(-max(n, 1) // BLOCK) * BLOCK


def source_width(longest: int) -> int:
    """The source positions S to prepare for rows of at most `longest` tokens.

    On a GPU a multiple of 32: what is prepared for a shape (`mx.compile`, CUDA's graphs and plans)
    is then used again, and attention stays one kernel, for which S must not be less than T.
    """
    return longest if cpu_only() else -(-longest // 32) * 32


@dataclass(frozen=True)
class Slots:
    """Where one pass of the decoder writes, and how far it has to look.

    Attributes:
        positions: (B, T) absolute positions of the new tokens; (1, T) if equal in all rows.
        start: the first of them if it is the same in all rows and known on the host, else None.
        seen: attention needs only this many slots from the left.
        mask: which source positions it may see, (P, H, K·T, S) or, of one prompt, (1, 1, 1, S);
            None if all of them.
    """

    positions: mx.array
    start: int | None
    seen: int
    mask: mx.array | None = None

    def write(self, array: mx.array, new: mx.array) -> mx.array:
        """Writes `new` (B, H, T, d_kv) at the positions of `array` (B, H, N, d_kv).

        Lazy, and without a copy if the caller keeps no other reference to `array`.
        """
        length = self.positions.shape[1]
        if self.start is not None:
            array[:, :, self.start : self.start + length] = new
            return array
        index = mx.broadcast_to(self.positions[:, None, :, None], new.shape)
        return mx.put_along_axis(array, index, new, axis=2)


class Cache:
    """The decoder's state for P prompts: cross-attention once, self-attention as it grows.

    All methods are lazy. A pass over tokens is `slots` once and `update` once in every layer.
    """

    def __init__(
        self,
        cross: list[tuple[mx.array, mx.array]],
        mask: mx.array | None,
        capacity: int,
        copies: int = 1,
    ):
        """Starts with the prompts' cross-attention and empty self-attention.

        Args:
            cross: keys and values of every layer, each (P, H, S, d_kv).
            mask: (P, S), True for source tokens and False for padding; None if no row is padded.
            capacity: slots to prepare for.
            copies: K.
        """
        batch, heads, _, width = cross[0][0].shape
        empty = (batch * copies, heads, round_up(capacity), width)
        self.cross_keys, self.cross_values = (list(arrays) for arrays in zip(*cross, strict=True))
        self.mask = None if mask is None else mask.astype(mx.bool_)
        self.copies = copies
        self.keys = [mx.zeros(empty, k.dtype) for k in self.cross_keys]
        self.values = [mx.zeros(empty, v.dtype) for v in self.cross_values]

    @property
    def batch(self) -> int:
        """The number of rows B."""
        return self.keys[0].shape[0]

    @property
    def prompts(self) -> int:
        """The number of prompts P."""
        return self.cross_keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """The number of slots N: positions 0 … N-1 can be written."""
        return self.keys[0].shape[2]

    @property
    def source(self) -> int:
        """The number of source positions S, padding included."""
        return self.cross_keys[0].shape[2]

    @property
    def state(self) -> list[mx.array]:
        """All arrays, for `mx.eval` and `mx.async_eval`."""
        mask = [] if self.mask is None else [self.mask]
        return [*self.keys, *self.values, *self.cross_keys, *self.cross_values, *mask]

    def slots(self, offsets: list[int] | mx.array, length: int) -> Slots:
        """Places `length` new tokens a row behind the offsets.

        Args:
            offsets: absolute position of each row's first new token. A list is best: with an
                array (B,) the pass has to look at all slots, as nothing is read back from it.
            length: T.

        Raises:
            ValueError: the slots do not suffice, or there is not one offset a row.
        """
        steps, mask = mx.arange(length), self._source_mask(length)
        if isinstance(offsets, mx.array):
            return Slots(offsets[:, None] + steps, None, self.capacity, mask)
        if len(offsets) != self.batch or min(offsets) < 0:
            raise ValueError(f"offsets {offsets} do not fit a cache of {self.batch} rows")
        end = max(offsets) + length
        if end > self.capacity:
            raise ValueError(
                f"{end} positions do not fit a cache of {self.capacity} slots; reserve({end}) first"
            )
        start = offsets[0] if len(set(offsets)) == 1 else None
        rows = mx.array(offsets if start is None else offsets[:1])
        return Slots(rows[:, None] + steps, start, round_up(end), mask)

    def _source_mask(self, length: int) -> mx.array | None:
        """The mask for `length` queries a row, written out, as attention would in every layer."""
        if self.mask is None:
            return None
        mask, heads = self.mask[:, None, None, :], self.cross_keys[0].shape[1]
        if self.prompts == 1:
            return mask
        queries = self.copies * length
        return mx.contiguous(mx.broadcast_to(mask, (self.prompts, heads, queries, self.source)))

    def update(
        self, layer: int, keys: mx.array, values: mx.array, slots: Slots
    ) -> tuple[mx.array, mx.array]:
        """Writes new keys and values (B, H, T, d_kv) of a layer into their slots.

        Returns:
            The keys and the values (B, H, N, d_kv) of the N slots that attention may see.
        """
        self.keys[layer] = slots.write(self.keys[layer], keys)
        self.values[layer] = slots.write(self.values[layer], values)
        return self.keys[layer][:, :, : slots.seen], self.values[layer][:, :, : slots.seen]

    def shared(self, copies: int, capacity: int) -> Cache:
        """Another cache of the same prompts, with `copies` empty rows of each."""
        cross = list(zip(self.cross_keys, self.cross_values, strict=True))
        return Cache(cross, self.mask, capacity, copies)

    def twin(self) -> Cache:
        """A copy, which shares what is never written: that of the source."""
        twin = self.shared(1, 1)
        twin.keys, twin.values = ([mx.array(a) for a in each] for each in (self.keys, self.values))
        return twin

    def reserve(self, capacity: int) -> None:
        """Grows to at least `capacity` slots, keeping what they hold."""
        if capacity > self.capacity:
            capacity = round_up(capacity)
            self.keys = [_widen(a, capacity) for a in self.keys]
            self.values = [_widen(a, capacity) for a in self.values]

    def keep(self, prompts: Sequence[int]) -> None:
        """Keeps only the rows of these prompts, in this order."""
        if list(prompts) == list(range(self.prompts)):
            return
        self.reorder([p * self.copies + k for p in prompts for k in range(self.copies)])
        index = mx.array(prompts, dtype=mx.int32)
        self.cross_keys = [a[index] for a in self.cross_keys]
        self.cross_values = [a[index] for a in self.cross_values]
        if self.mask is not None:
            self.mask = self.mask[index]

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes every row a copy of one of the same prompt, given by its number."""
        if list(rows) == list(range(self.batch)):
            return
        index = mx.array(rows, dtype=mx.int32)
        self.keys = [a[index] for a in self.keys]
        self.values = [a[index] for a in self.values]

    def trim(self, source: int, capacity: int) -> None:
        """Frees the positions beyond these, if they are at least half of all.

        Args:
            source: source positions that the longest row has.
            capacity: slots that have been written and will not be written again.
        """
        source = source_width(source)
        if 2 * source <= self.source:
            self.cross_keys = [_narrow(a, source) for a in self.cross_keys]
            self.cross_values = [_narrow(a, source) for a in self.cross_values]
            self.mask = None if self.mask is None else self.mask[:, :source]
        capacity = round_up(capacity)
        if 2 * capacity <= self.capacity:
            self.keys = [_narrow(a, capacity) for a in self.keys]
            self.values = [_narrow(a, capacity) for a in self.values]

    def append(self, other: Cache) -> None:
        """Adds the prompts of `other`, of as many rows each; the shorter cache is padded."""
        capacity = max(self.capacity, other.capacity)
        source = max(self.source, other.source)
        if self.mask is not None or other.mask is not None or self.source != other.source:
            self.mask = mx.concatenate([self._wide_mask(source), other._wide_mask(source)])
        for name in ("keys", "values", "cross_keys", "cross_values"):
            length = source if name.startswith("cross") else capacity
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            joined = [mx.concatenate([_widen(a, length), _widen(b, length)]) for a, b in pairs]
            setattr(self, name, joined)

    def _wide_mask(self, source: int) -> mx.array:
        """The mask (P, `source`) in which all positions past this cache's S are hidden."""
        mask = mx.ones((self.prompts, self.source), mx.bool_) if self.mask is None else self.mask
        return mx.pad(mask, ((0, 0), (0, source - self.source)))


def _narrow(array: mx.array, length: int) -> mx.array:
    """The first `length` places of axis 2 of (B, H, N, d_kv); a copy, as a view keeps all of it."""
    return mx.contiguous(array[:, :, :length])


def _widen(array: mx.array, length: int) -> mx.array:
    """Pads axis 2 of (B, H, N, d_kv) with zeros."""
    missing = length - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else array
