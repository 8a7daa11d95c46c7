"""A decoder layer that is described once a shape and run many times, on GPUs.

Describing a layer can take the host longer than a GPU takes to compute it. `mx.compile` keeps what
was described for arrays of the same shapes. One layer is compiled rather than a pass: its weights
are inputs, so all layers of a model are one function, a new shape costs as little as one layer, and
the device can begin with the first ones while the host goes on. Positions are an array, and there
are few shapes: sources are padded to multiples of 32, and slots are powers of two (cache.py).

What is compiled has kernels of its own, which a GPU compiles at their first use, 26 to 100 ms each
on Metal and seconds on CUDA. So that begins after some passes only, see `pays`. Without a GPU
nothing is compiled: MLX would call a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from mlx_t5.backend import cpu_only, mx, on_cpu
from mlx_t5.network.cache import Slots
from mlx_t5.network.config import T5Config
from mlx_t5.network.layers import Blocks, Layer, decoder_layer

PASSES = 2000  # of a model, for which compiling pays
MOST_SHAPES = 256  # that are kept


def pays(passes: int, slots: Any) -> bool:
    """Whether to run compiled layers, after so many passes of the model.

    Rows that attend alone (exact.py) have arrays of many shapes, and stay as they are.
    """
    if cpu_only() or not isinstance(slots, Slots):
        return False
    return passes >= PASSES or on_cpu()  # a rehearsal takes what GPUs have in the end


def compiled_layer(config: T5Config, slots: Slots) -> Layer:
    """`layers.decoder_layer`, compiled for a pass over slots like these."""
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return partial(_run, _compiled(config, slots.seen, *shapes, slots.mask is None))


@lru_cache(MOST_SHAPES)
def _compiled(config: T5Config, seen: int, *shapes: Any) -> Callable[..., Any]:
    """Compiled for these shapes alone: MLX looks through all that a function was compiled for."""
    return mx.compile(partial(_described, config, seen))


def _run(
    run: Callable[..., Any], blocks: Blocks, x: mx.array, bias: mx.array, slots: Slots, i: int
) -> mx.array:
    """A `Layer`, by what was compiled."""
    keys, values = slots.keys, slots.values
    x, keys[i], values[i] = run(
        blocks, x, bias, slots.positions, keys[i], values[i], slots.cross[i], slots.mask
    )
    return x


def _described(
    config: T5Config,
    seen: int,
    blocks: Blocks,
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
    x = decoder_layer(config, blocks, x, bias, slots, 0)
    return x, slots.keys[0], slots.values[0]
