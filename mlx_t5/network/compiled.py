"""Decoder layers that are described once a shape and run many times, on GPUs.

Describing a layer can take the host longer than a GPU takes to compute it. `mx.compile` keeps what
was described for arrays of the same shapes. One layer is compiled rather than a pass: the weights
are inputs, so all layers of a model are one function, a new shape costs as little as one layer, and
the device can begin with the first ones while the host goes on. Positions are an array, and there
are few shapes: sources are padded to multiples of 32, and slots are powers of two (cache.py).

A compiled layer has kernels of its own, which a GPU compiles at their first use, 26 to 100 ms each
on Metal and seconds on CUDA. So that begins after some passes only, see `pays`. Without a GPU
nothing is compiled: MLX would call a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from mlx_t5.backend import cpu_only, mx, on_cpu
from mlx_t5.network.cache import Slots
from mlx_t5.network.layers import Block, Blocks, Sizes, decoder_layer
from mlx_t5.network.linear import Kind, Matrix

PASSES = 2000  # for which compiling pays
MOST_SHAPES = 256  # what is kept; then it starts over
Arrays: TypeAlias = tuple[list[mx.array], list[list[tuple[mx.array, ...]]]]  # norms and weights
Kinds: TypeAlias = tuple[tuple[Kind, ...], ...]  # of the weights
Layer = Callable[[mx.array, mx.array, Slots, int], mx.array]  # of x, bias, slots and its number


def pays(passes: int, slots: Any) -> bool:
    """Whether to run compiled layers, after so many passes of the model.

    Rows that attend alone (exact.py) have arrays of many shapes, and stay as they are.
    """
    if cpu_only() or not isinstance(slots, Slots):
        return False
    return passes >= PASSES or on_cpu()  # a rehearsal takes what GPUs have in the end


class CompiledLayers:
    """The layers of a decoder; its weights must not be replaced afterwards."""

    def __init__(self, sizes: Sizes, layers: Sequence[Blocks]) -> None:
        """Prepares to compile layers of these sizes."""
        self._sizes, self._layers = sizes, [_apart(blocks) for blocks in layers]
        self._by_shape: dict[tuple, list[Layer]] = {}

    def functions(self, slots: Slots) -> list[Layer]:
        """Every layer of a pass that writes to these slots, or to others of the same shape."""
        here = slots.positions.shape, slots.keys[0].shape, slots.seen
        shape = *here, slots.cross[0][0].shape, slots.mask is None
        if shape not in self._by_shape:
            if len(self._by_shape) == MOST_SHAPES:
                self._by_shape.clear()
            compiled = {
                kinds: mx.compile(partial(_described, self._sizes, kinds, slots.seen))
                for kinds in {kinds for _, kinds in self._layers}
            }
            self._by_shape[shape] = [
                partial(_run, compiled[kinds], arrays) for arrays, kinds in self._layers
            ]
        return self._by_shape[shape]


def _run(
    compiled: Callable[..., Any], arrays: Arrays, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """A `Layer`, by the compiled function that takes arrays."""
    state = slots.keys[i], slots.values[i]
    x, slots.keys[i], slots.values[i] = compiled(
        arrays, x, bias, slots.positions, *state, slots.cross[i], slots.mask
    )
    return x


def _described(
    sizes: Sizes,
    kinds: Kinds,
    seen: int,
    arrays: Arrays,
    x: mx.array,
    bias: mx.array,
    positions: mx.array,
    keys: mx.array,
    values: mx.array,
    cross: tuple[mx.array, mx.array],
    mask: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """What is compiled: the residual behind a layer, and the keys and values of its cache."""
    slots = Slots([keys], [values], positions, None, seen, len(keys), len(cross[0]), [cross], mask)
    x = decoder_layer(sizes, _together(arrays, kinds), x, bias, slots, 0)
    return x, slots.keys[0], slots.values[0]


def _apart(blocks: Blocks) -> tuple[Arrays, Kinds]:
    """The arrays of a layer, which `mx.compile` takes, and the rest, which it does not."""
    norms = [block.norm for block in blocks]
    weights = [[matrix.arrays for matrix in (*b.inputs, b.output)] for b in blocks]
    kinds = tuple(tuple(matrix.kind for matrix in (*b.inputs, b.output)) for b in blocks)
    return (norms, weights), kinds


def _together(arrays: Arrays, kinds: Kinds) -> Blocks:
    """The blocks that `_apart` has taken apart."""
    blocks = []
    for norm, weights, kinds_of_block in zip(*arrays, kinds, strict=True):
        *inputs, output = map(Matrix, weights, kinds_of_block)
        blocks.append(Block(norm, tuple(inputs), output))
    return tuple(blocks)
