"""Exact decoding: a row's logits have the same bits whatever is proposed, in whatever batch.

Rounding depends on the order of summation, and kernels choose the order by the number of positions
in a pass. So here the shape of a pass does not depend on the proposals: each row is padded to W
positions, and padding rows fill the pass up to R rows. Attention and the encoder sum over
positions, so they work on each prompt alone.

No library guarantees that such passes round all rows alike. So before decoding, `exact_target`
looks for values of R and W that do: it tests every kind of weight, attention, and the whole decoder
with random numbers, which suffice because kernels are chosen by shapes and types alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.network.cache import SLOT_MULTIPLE, Attend, Cache, Slots, round_up
from mlx_t5.network.linear import QUANTIZATION, Matrix
from mlx_t5.sampling.draws import Sampling, probabilities
from mlx_t5.settings import Settings, check_exact

if TYPE_CHECKING:
    from mlx_t5.model import T5

WIDTHS = (8, 16, 32)  # kernels treat rows alike in blocks of 8, or of a larger power of two
# Numbers of keys that attention is tested with: lengths of sources, and numbers of slots.
SOURCES = (1, 2, 7, 16, 31, 100, 257)
SLOTS = tuple(n * SLOT_MULTIPLE for n in (1, 2, 3, 5, 9, 17))

Product = Callable[[mx.array], mx.array]


class ExactTarget:
    """A `T5` whose passes have fixed shapes; an `interface.Target`.

    `rows` are the numbers of rows that a pass may have, ascending up to those of a full batch.
    """

    def __init__(self, model: T5, width: int, rows: Sequence[int]) -> None:
        self.model, self.config, self.width, self.rows = model, model.config, width, rows
        self.weights_read = model.weights_read

    def encode(self, ids: mx.array, mask: mx.array | None = None) -> mx.array:
        rows = [self.model.encode(*row) for row in _unpadded(ids, mask)]
        padded = [mx.pad(x, [(0, 0), (0, ids.shape[1] - x.shape[1]), (0, 0)]) for x in rows]
        return mx.concatenate(padded)

    def cache(self, encoded: mx.array, mask: mx.array | None = None, capacity: int = 1) -> Any:
        rows = _unpadded(encoded, mask)
        return ExactCache([self.model.cache(*row, capacity) for row in rows])

    def decode(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array:
        batch, length = tokens.shape
        padding = next(n for n in self.rows if n >= batch) - batch
        tokens = mx.pad(tokens, ((0, padding), (0, self.width - length)))
        return self.model.decode(tokens, cache, offsets + [0] * padding)[:batch, :length]

    def cache_memory(self, prompts: int, source: int, target: int, rows: int = 0) -> int:
        return self.model.cache_memory(prompts, source, target + self.width, rows)

    def encoder_memory(self, rows: int, source: int) -> int:
        return self.model.encoder_memory(1, source)


def _unpadded(rows: mx.array, mask: mx.array | None) -> Iterator[tuple[mx.array, mx.array | None]]:
    """Yields each row up to its last visible position, and its mask, or None if all are visible."""
    for i in range(len(rows)):
        row, of_row = rows[i : i + 1], None
        if mask is not None:
            visible = mask[i].tolist()
            n = len(visible) - visible[::-1].index(True)
            row, of_row = row[:, :n], None if all(visible[:n]) else mask[i : i + 1, :n]
        yield row, of_row


@dataclass
class ExactCache:
    """A `Cache` for each row, so that no row is padded to the length of another."""

    rows: list[Cache]

    @property
    def state(self) -> list[mx.array]:
        return [array for row in self.rows for array in row.state]

    def trim(self, source: int, capacity: int) -> None:
        """Does nothing: no row is longer than it needs to be."""

    def filter(self, rows: Sequence[int]) -> None:
        kept: list[Cache] = []
        for row in (self.rows[i] for i in rows):
            kept.append(row.twin() if row in kept else row)
        self.rows = kept

    def extend(self, other: ExactCache) -> None:
        self.rows = self.rows + other.rows

    def slots(self, offsets: list[int], length: int) -> ExactSlots:
        # There may be more offsets: padding rows have one, but no cache.
        rows = [row.slots([at], length) for row, at in zip(self.rows, offsets, strict=False)]
        return ExactSlots(rows, offsets, length)


class ExactSlots:
    """Attends as `cache.Slots` does, but row by row."""

    def __init__(self, rows: list[Slots], offsets: list[int], length: int) -> None:
        self.rows, self.offsets = rows, offsets
        self.batch = self.prompts = len(offsets)
        self.queries = np.array(offsets)[:, None] + np.arange(length)
        self.seen = max(slots.seen for slots in rows)

    def self_attention(
        self, attend: Attend, layer: int, q: mx.array, k: mx.array, v: mx.array, bias: mx.array
    ) -> mx.array:
        rows = []
        for i, slots in enumerate(self.rows):
            row, over = slice(i, i + 1), partial(_over_slots, attend, self.offsets[i])
            rows.append(slots.self_attention(over, layer, q[row], k[row], v[row], bias[row]))
        return self._padded(rows)

    def cross_attention(self, attend: Attend, layer: int, q: mx.array) -> mx.array:
        rows = enumerate(self.rows)
        return self._padded([s.cross_attention(attend, layer, q[i : i + 1]) for i, s in rows])

    def _padded(self, rows: list[mx.array]) -> mx.array:
        padding = mx.zeros((self.batch - len(rows), *rows[0].shape[1:]), rows[0].dtype)
        return mx.concatenate([*rows, padding])


def _over_slots(
    attend: Attend, offset: int, q: mx.array, k: mx.array, v: mx.array, bias: mx.array
) -> mx.array:
    """Attends from W queries, the first at position `offset`."""

    def over(slots: int) -> mx.array:
        return attend(q, k[:, :, :slots], v[:, :, :slots], bias[..., :slots])

    # More slots may change how attention rounds, even if they are hidden. So the number of slots
    # depends on the query's own position p, not on the pass's other queries: it is round_up(p + 1).
    near, last = round_up(offset + 1), offset + q.shape[2]
    if last <= near:
        return over(near)
    inside = near - offset  # queries that attend to the first `near` slots
    return mx.concatenate([over(near)[:, :, :inside], over(round_up(last))[:, :, inside:]], axis=2)


# ---- the search for shapes ----------------------------------------------------------------------


def exact_targets(model: T5, default: Settings) -> Callable[..., ExactTarget]:
    """Returns target(batch, settings), with room for the proposals of the default settings."""
    check_exact(default, WIDTHS[-1])
    room = default.num_draft if isinstance(default.num_draft, int) else 0
    search = cache(partial(exact_target, model, num_draft=room))

    def target(batch: int, settings: Settings = default) -> ExactTarget:
        exact = search(batch)
        check_exact(settings, exact.width)
        return exact

    return target


def exact_target(model: T5, batch: int, num_draft: int) -> ExactTarget:
    """Finds the smallest width with room for `num_draft` proposals that makes rows independent."""
    widths = [width for width in WIDTHS if width > num_draft]
    for width in widths:
        rows = attention_is_exact(model, width) and exact_row_counts(model, batch, width)
        if rows and decoder_is_exact(target := ExactTarget(model, width, rows)):
            return target
    cause = "this device rounds a row differently by its place in a pass"
    at = f"at {' and '.join(map(str, widths))} positions a row"
    raise UserError(f"exact decoding is not possible here: {cause}, {at}; decode without it")


def exact_row_counts(model: T5, batch: int, width: int) -> list[int]:
    """Finds numbers of rows with the bits of a full batch; none if places matter."""
    fewer = [2**i for i in range(batch.bit_length()) if 2**i < batch]
    for product, inputs in products(model):
        for x in inputs(batch * width):
            out = product(x)
            if not place_is_irrelevant(product, x, out):
                return []
            fewer = [n for n in fewer if _equal(product(x[: n * width]), out[: n * width])]
    return [*fewer, batch]


def place_is_irrelevant(product: Product, x: mx.array, out: mx.array) -> bool:
    """Returns whether rows keep their bits at other places, beside other rows; out = product(x)."""
    order = mx.arange(len(x))
    for places in (mx.roll(order, 1), order[::-1]):
        for first in (0, 1):
            mixed = mx.array(x[places])
            mixed[1 - first :: 2] = mx.random.normal(mixed[1 - first :: 2].shape)
            if not _equal(product(mixed)[first::2], out[places][first::2]):
                return False
    return True


def products(model: T5) -> Iterator[tuple[Product, Callable[[int], list[mx.array]]]]:
    """Yields each kind of product in a decoder pass, and a function that makes inputs to test it.

    The second half of the weight repeats the first half, and in the second input it is negated. So
    the terms of every sum cancel, and what remains are rounding errors: they reveal a different
    order of summation even in 16 bits. The halves are shifted against each other, because an order
    that adds the two terms of a pair first would leave nothing.
    """
    dtype, seen = model.dtype, set()
    layers, norm = model.decoder.arrays
    wide = norm.weight.dtype  # the residual's type
    every = [(model.head, dtype, False)]
    for *attentions, feed_forward in layers:
        for block in (*attentions, feed_forward):
            every += [(matrix, dtype, False) for matrix in block.inputs]
            every.append((block.output, dtype if block is not feed_forward else wide, True))
    for matrix, of_inputs, adds_residual in every:
        kind = matrix[1:], adds_residual, *((a.shape, a.dtype) for a in matrix.arrays)
        if kind not in seen:
            seen.add(kind)
            yield _cancelling(matrix, of_inputs, wide if adds_residual else None)


def _cancelling(
    matrix: Matrix, dtype: mx.Dtype, residual: mx.Dtype | None
) -> tuple[Product, Callable[[int], list[mx.array]]]:
    quantization = dict(zip(QUANTIZATION, matrix.quantization, strict=False))
    group = quantization.get("group_size", 1)  # equal groups of columns are quantized alike
    arrays = matrix.arrays if quantization else (matrix.arrays[0].T,)  # outputs first
    outputs, width, stored = len(arrays[0]), arrays[-1].shape[1] * group, arrays[-1].dtype
    half = width // group // 2 * group

    def doubled(a: mx.array, sign: int) -> mx.array:
        shifted, rest = sign * mx.roll(a[:, :half], group, axis=1), max(sign, 0) * a[:, 2 * half :]
        return mx.concatenate([a[:, :half], shifted, rest], axis=1)

    def inputs(rows: int) -> list[mx.array]:
        x = mx.random.normal((rows, width)).astype(dtype)
        return [x, doubled(x, -1)]

    weight = doubled(inputs(min(outputs, 1024))[0], 1)
    weight = weight.astype(stored) if mx.issubdtype(stored, mx.floating) else weight
    few = mx.quantize(weight, **quantization) if quantization else [weight]
    all_rows = tuple(array[mx.arange(outputs) % len(weight)] for array in few)
    like = matrix._replace(arrays=all_rows if quantization else (all_rows[0].T,))

    def product(x: mx.array) -> mx.array:
        # Without quantization, one kernel may compute the product and add the residual.
        return like.times(x, mx.zeros((len(x), outputs), residual) if residual else None)

    return product, inputs


def attention_is_exact(model: T5, width: int) -> bool:
    """Returns whether a query's attention has the same bits at any place in a pass."""
    heads, size, dtype = model.config.num_heads, model.config.d_kv, model.dtype
    for n in SOURCES + SLOTS:
        keys, values = mx.random.normal((2, 1, heads, (n + 1) // 2, size)).astype(dtype)
        keys = mx.repeat(keys, 2, axis=2)[:, :, :n]
        # Every second value cancels the one before it.
        values = mx.stack([values, -values], axis=3).reshape(1, heads, -1, size)[:, :, :n]
        bias = mx.random.normal((1, heads, 1, n)).astype(dtype)
        mask = mx.broadcast_to(bias, (1, heads, width, n)) if n in SLOTS else None

        def over(x: mx.array, keys=keys, values=values, mask=mask) -> mx.array:
            queries = x.astype(dtype).swapaxes(0, 1)[None]
            return model.attention(queries, keys, values, mask)[0].swapaxes(0, 1)

        x = mx.random.normal((width, heads, size)) * size**-0.5
        if not place_is_irrelevant(over, x, over(x)):
            return False
    return True


def decoder_is_exact(target: ExactTarget) -> bool:
    """Returns whether a row has the same bits token by token and alone as in a full batch.

    Both its logits are compared and the probabilities that sampling computes from them.
    """
    model, width, others = target.model, target.width, target.rows[-1] - 1

    def some(*shape: int) -> mx.array:
        return mx.random.randint(0, model.config.vocab_size, shape)

    def results(logits: mx.array) -> mx.array:
        sampling = Sampling.of([Settings(temp=0.7, top_k=50, top_p=0.9)] * len(logits))
        return mx.stack([logits, probabilities(logits, sampling)[0]])

    row, other = (model.cache(model.encode(some(1, n))) for n in (9, 5))
    alone, batch = (ExactCache([row.shared(1, 1)]) for _ in range(2))
    batch.rows = [*(other.shared(1, 1) for _ in range(others)), *batch.rows]
    at = 2 * SLOT_MULTIPLE - width - 2  # slots before this hold zeros; the second pass adds slots
    for size in (width // 2, width):
        tokens = some(others + 1, size)
        offsets = [i % at for i in range(others)] + [at]
        together = results(target.decode(tokens, batch, offsets))[:, -1]
        for i in range(size):
            single = results(target.decode(tokens[-1:, i : i + 1], alone, [at + i]))[:, 0, 0]
            if not _equal(together[:, i], single):
                return False
        at += size
    return True


def _equal(a: mx.array, b: mx.array) -> bool:
    return mx.array_equal(a, b).item()
