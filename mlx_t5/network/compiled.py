"""Decoder layers as units: compiled for decoding on GPUs, or checkpointed in training.

Building a layer's graph in Python can take longer than computing it on the GPU. One layer is
compiled, not a whole pass: the weights are inputs, so all layers share one function, and the
device can start with the first layers while Python continues. A compiled layer has its own
kernels, which a GPU compiles at their first use, so only many passes make up for it.

A layer is a function of (config, blocks, x, bias, slots, i), as model.py defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

from mlx_t5.backend import cpu_only, mx, on_cpu, tree_map
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.network.cache import KeysValues, Slots

PASSES_BEFORE_COMPILING = 2000  # after this number of decoder passes, compiling a layer pays
MOST_SHAPES = 256  # number of shapes whose compiled layers are kept
Layer = Callable[..., mx.array]


def for_pass(layer: Layer, config: T5Config, slots: Any, passes: int) -> Layer:
    """The layer for a pass over these slots, compiled if there have been enough passes."""
    # In exact decoding each row has its own number of keys: too many combinations of shapes.
    if passes < passes_before_compiling() or not isinstance(slots, Slots):
        return partial(layer, config)
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return _compiled(layer, config, slots.seen, *shapes, slots.mask is None)


@cache
def passes_before_compiling() -> float:
    if cpu_only():
        return math.inf  # compiling needs a C++ compiler on a CPU
    return 0 if on_cpu() else PASSES_BEFORE_COMPILING  # T5_REHEARSE compiles at once


@lru_cache(MOST_SHAPES)
def _compiled(layer: Layer, config: T5Config, seen: int, *shapes: Any) -> Layer:
    # With one function for many shapes, MLX would search its compiled graphs one by one in every
    # call. So each combination has a function of its own, which `lru_cache` finds at once.
    @mx.compile
    def run(blocks: tuple, x, bias, positions, keys, values, cross, mask) -> tuple:
        prompts = len(cross[0])
        slots = Slots([keys], [values], positions, None, seen, len(keys), prompts, [cross], mask)
        x = layer(config, blocks, x, bias, slots, 0)
        return x, slots.keys[0], slots.values[0]

    def compiled(blocks: tuple, x: mx.array, bias: mx.array, slots: Slots, i: int) -> mx.array:
        arrays = slots.keys[i], slots.values[i], slots.cross[i], slots.mask
        x, slots.keys[i], slots.values[i] = run(blocks, x, bias, slots.positions, *arrays)
        return x

    return compiled


def compile_at_once(*models: Any) -> None:
    """Makes GPUs compile the models' decoder layers in the next pass: for many passes to come."""
    for model in models:
        if hasattr(model, "passes"):
            model.passes += PASSES_BEFORE_COMPILING


def checkpointed(layer: Layer) -> Layer:
    """A function that recomputes its activations in the backward pass (arXiv 1604.06174)."""

    # MLX differentiates with respect to all arguments, but integers (quantized weights) cannot be.
    def fixed(leaf: Any) -> Any:
        integer = isinstance(leaf, mx.array) and not mx.issubdtype(leaf.dtype, mx.floating)
        return mx.stop_gradient(leaf) if integer else leaf

    return mx.checkpoint(lambda *args: layer(*tree_map(fixed, args)))


def checkpointed_decoder(layer: Layer) -> Layer:
    """A `checkpointed` layer of a decoder that reads whole texts."""

    def run(blocks: tuple, x: mx.array, bias: mx.array, slots: Slots, i: int) -> mx.array:
        def alone(blocks: tuple, x: mx.array, bias: mx.array, cross: KeysValues) -> mx.array:
            return layer(blocks, x, bias, replace(slots, cross=[cross]), 0)

        return checkpointed(alone)(blocks, x, bias, slots.cross[i])

    return run
