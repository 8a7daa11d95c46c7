"""Finds pass shapes for which a row's logits have the same bits, whatever the other rows are.

A pass's shape is its number of rows and its width, the number of positions to which each row is
padded. `exact.ExactTarget` relies on equal bits, but no library guarantees them. So shapes are
tested before decoding: with every kind of weight, with attention, and with the whole decoder.
Random numbers suffice: kernels are chosen by shapes alone, and a different order of summation shows
at once.

Symbols: B maximum number of rows in flight, W width, K inputs of a product, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.network.attention import attention
from mlx_t5.network.cache import SLOT_MULTIPLE
from mlx_t5.network.exact import ExactCache, ExactTarget
from mlx_t5.network.layers import residual_dtype
from mlx_t5.network.linear import Matrix
from mlx_t5.sampling.draws import Sampling, probabilities
from mlx_t5.settings import Settings, check_exact

if TYPE_CHECKING:
    from model import T5

WIDTHS = (8, 16, 32)  # kernels treat rows alike in blocks of 8, or of a larger power of two
LONGEST_AUTO = WIDTHS[0] - 1  # maximum number of proposals with num_draft="auto", for any width
# Numbers of keys that attention is tested with: lengths of sources, and numbers of slots.
SOURCES = (1, 2, 7, 16, 31, 100, 257)
SLOTS = tuple(n * SLOT_MULTIPLE for n in (1, 2, 3, 5, 9, 17))

Product = Callable[[mx.array], mx.array]


def exact_targets(model: T5, default: Settings) -> Callable[..., ExactTarget]:
    """Returns a function that wraps the model in an `ExactTarget` for a number of rows.

    Args:
        model: the target.
        default: the default settings. If num_draft is a number, every pass has room for that many
            proposals per row.

    Returns:
        target(batch, settings), which returns the `ExactTarget` for at most `batch` rows. It raises
        `UserError` for settings that exact decoding does not support. The `ExactTarget` of each
        `batch` is made once.
    """
    room = default.num_draft if isinstance(default.num_draft, int) else 0
    looked_for = cache(partial(exact_target, model, num_draft=room))

    def target(batch: int, settings: Settings = default) -> ExactTarget:
        check_exact(settings, WIDTHS[-1])  # before the search, which takes a while
        exact = looked_for(batch)
        check_exact(settings, exact.width)
        return exact

    return target


def exact_target(model: T5, batch: int, num_draft: int) -> ExactTarget:
    """Wraps the model so that a row's results have the same bits whatever other rows there are.

    Every pass then has the same number of positions per row: the smallest width with which rows are
    independent.

    Args:
        model: the target.
        batch: maximum number of rows in flight.
        num_draft: number of proposals that the width must have room for.

    Raises:
        UserError: no width has room for `num_draft` proposals and makes rows independent.
    """
    check_exact(Settings(num_draft=num_draft), WIDTHS[-1])
    widths = [width for width in WIDTHS if width > num_draft]
    for width in widths:
        rows = attention_is_exact(model, width) and exact_row_counts(model, batch, width)
        if rows:
            target = ExactTarget(model, width, rows)
            if decoder_is_exact(target):
                return target
    raise UserError(
        "exact decoding is not possible here: this device rounds a row differently by its place "
        f"in a pass, at {' and '.join(map(str, widths))} positions a row; decode without it"
    )


def exact_row_counts(model: T5, batch: int, width: int) -> list[int]:
    """Returns the row counts for which the products have the same bits as a full batch's.

    A full batch has `batch` rows. Of the smaller counts, only powers of two are tested.

    Returns:
        The counts in ascending order, `batch` last. If a row's bits depend on its place in a pass,
        the list is empty.
    """
    fewer = [2**i for i in range(batch.bit_length()) if 2**i < batch]
    for product, inputs in products(model):
        for x in inputs(batch * width):
            out = product(x)
            if not place_is_irrelevant(product, x, out):
                return []
            fewer = [n for n in fewer if _equal(product(x[: n * width]), out[: n * width])]
    return [*fewer, batch]


def place_is_irrelevant(product: Product, x: mx.array, out: mx.array) -> bool:
    """Returns whether a row's product keeps its bits if its place and the other rows change.

    Two moves are tested: each row to the next place, and all rows in reverse order. After a move,
    random numbers replace the rows at odd places, or in a second test the rows at even places. The
    remaining rows must keep their results.

    Args:
        product: a function that should compute each row independently.
        x: its input, rows first.
        out: its output for x.
    """
    order = mx.arange(len(x))
    for places in (mx.roll(order, 1), order[::-1]):
        for first in (0, 1):
            mixed = mx.array(x[places])
            mixed[1 - first :: 2] = mx.random.normal(mixed[1 - first :: 2].shape)
            if not _equal(product(mixed)[first::2], out[places][first::2]):
                return False
    return True


def products(model: T5) -> Iterator[tuple[Product, Callable[[int], list[mx.array]]]]:
    """Yields each kind of matrix product in a decoder pass; kinds differ in shape or type.

    Yields:
        A product, and a function that returns two inputs to test it, given the number of rows.
        The first input is random. With the second input, the terms of every sum cancel, so that
        only rounding errors remain. These errors reveal a different order of summation even in 16
        bits.
    """
    every = [(model.head, False)]
    for block in chain(*model.decoder.blocks):
        every += [*((matrix, False) for matrix in block.inputs), (block.output, True)]
    dtype, seen = model.decoder.norm.weight.dtype, set()  # type of activations
    for matrix, adds_residual in every:
        kind = matrix[1:], adds_residual, *((a.shape, a.dtype) for a in matrix.arrays)
        if kind not in seen:
            seen.add(kind)
            yield _cancelling(matrix, dtype, adds_residual)


def _cancelling(
    matrix: Matrix, dtype: mx.Dtype, adds_residual: bool
) -> tuple[Product, Callable[[int], list[mx.array]]]:
    """Returns a product to test, and the function that makes inputs for it; see `products`.

    The product's weight is `matrix`, but the right half is replaced with a copy of the left half.
    In the second input, the right half is a negated copy of the left half. So the terms of every
    sum cancel. The columns of both copies are rotated by one quantization group, or by one column
    if `matrix` is not quantized.

    Args:
        matrix: a matrix of the model.
        dtype: type of the inputs for a matrix whose scales are integers. For any other matrix,
            the inputs have the type of its scales or weight.
        adds_residual: whether the model adds a residual to this product. If `matrix` is not
            quantized, the returned product then adds zeros.
    """
    quantized, group = bool(matrix.quantization), [*matrix.quantization, 1][0]
    arrays = matrix.arrays if quantized else (matrix.arrays[0].T,)  # outputs first
    groups, stored = arrays[-1].shape[1], arrays[-1].dtype
    dtype = stored if mx.issubdtype(stored, mx.floating) else dtype  # some scales are integers
    doubled = []
    for array in arrays:
        half = array[:, : groups // 2 * (array.shape[1] // groups)]
        turned = mx.roll(half, half.shape[1] // max(groups // 2, 1), axis=1)
        rest = array[:, 2 * half.shape[1] :]  # the last group, if their number is odd
        doubled.append(mx.concatenate([half, turned, rest], axis=1))
    like = matrix._replace(arrays=tuple(doubled) if quantized else (mx.contiguous(doubled[0]).T,))

    def inputs(rows: int) -> list[mx.array]:
        x = mx.random.normal((rows, groups * group)).astype(dtype)
        half = x[:, : groups // 2 * group]
        rest = mx.zeros_like(x[:, 2 * half.shape[1] :])
        return [x, mx.concatenate([half, -mx.roll(half, group, axis=1), rest], axis=1)]

    def adding(x: mx.array) -> mx.array:
        return like.times(x, mx.zeros((len(x), len(arrays[0])), residual_dtype(stored)))

    # Without quantization, one kernel may compute the product and add the residual.
    return adding if adds_residual and not quantized else like.times, inputs


def attention_is_exact(model: T5, width: int) -> bool:
    """Returns whether attention's output for a query has the same bits at any place in a pass.

    Self- and cross-attention are tested, in passes over `width` positions.
    """
    heads, size = model.config.num_heads, model.config.d_kv
    dtype = model.decoder.norm.weight.dtype
    for n in SOURCES + SLOTS:
        # Every second value cancels the one before it.
        keys, values = (mx.random.normal((1, heads, (n + 1) // 2, size)) for _ in "kv")
        keys = mx.repeat(keys, 2, axis=2)[:, :, :n].astype(dtype)
        values = mx.stack([values, -values], axis=3).reshape(1, heads, -1, size)[:, :, :n]
        values, bias = values.astype(dtype), mx.random.normal((1, heads, 1, n)).astype(dtype)
        mask = mx.broadcast_to(bias, (1, heads, width, n)) if n in SLOTS else None

        def over(x: mx.array, keys=keys, values=values, mask=mask) -> mx.array:
            queries = x.astype(dtype).swapaxes(0, 1)[None]
            return attention(queries, keys, values, mask)[0].swapaxes(0, 1)

        x = mx.random.normal((width, heads, size)) * size**-0.5
        if not place_is_irrelevant(over, x, over(x)):
            return False
    return True


def decoder_is_exact(target: ExactTarget) -> bool:
    """Returns whether a row has the same logits alone as in a full batch, bit for bit.

    Alone, the row gets one token per pass. In the batch, the number of tokens differs from pass to
    pass. The probabilities that sampling computes from the logits must have the same bits too.
    """
    width, batch = target.width, target.rows[-1]
    begin = SLOT_MULTIPLE - width // 2  # so that a pass crosses into more slots

    def some(*shape: int) -> mx.array:
        return mx.random.randint(0, target.config.vocab_size, shape)

    tokens, batch_cache = some(1, begin + width), target.cache(target.encode(some(1, 5)))
    row = target.cache(target.encode(some(1, 9)))
    for at in range(0, begin, width):
        target.decode(tokens[:, at : min(at + width, begin)], row, [at])
    row.keep([0, 0])
    alone, beside = (ExactCache([cache]) for cache in row.rows)
    batch_cache.keep([0] * (batch - 1))
    batch_cache.append(beside)
    at, sizes, same = begin, (width // 2 - 1, 1, width - width // 2), []
    for size in sizes:
        fed = mx.concatenate([some(batch - 1, size), tokens[:, at : at + size]])
        together = target.decode(fed, batch_cache, [i % begin for i in range(batch - 1)] + [at])
        for i in range(size):
            single = target.decode(tokens[:, at + i : at + i + 1], alone, [at + i])
            same.append(_equal(together[-1, i], single[0, 0]))
            same.append(_equal(_sampled_from(together)[-1, i], _sampled_from(single)[0, 0]))
        at += size
    return all(same)


def _sampled_from(logits: mx.array) -> mx.array:
    """Returns the probabilities that sampling with typical settings computes from these logits."""
    settings = Settings(temp=0.7, top_k=50, top_p=0.9)
    return probabilities(logits, Sampling.of([settings] * len(logits)))[0]


def _equal(a: mx.array, b: mx.array) -> bool:
    return mx.array_equal(a, b).item()
