"""Decoder layers as units: compiled for decoding, or checkpointed in training.

Building a layer's graph in Python can take longer than computing it on the GPU, and on a CPU each
operation of a small model costs more than its arithmetic. One layer is compiled, not a whole pass:
the weights are inputs, so all layers share one function, and the device can start with the first
layers while Python continues. A compiled layer has its own kernels, which are compiled at their
first use (on a CPU by g++, in 8 s), so only many passes make up for it.

MLX keeps a CPU's kernels as shared libraries in the temporary folder and loads any library that
lies there (mlx/backend/cpu/compiled.cpp), so layers are compiled only if nobody else can write
there.

A layer is a function of (config, blocks, x, bias, slots, i), as model.py defines it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from mlx_t5.backend import cpu_only, mx, on_cpu, tree_map
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.errors import UserError, log
from mlx_t5.network.cache import NO_QUERIES, KeysValues, Slots

PASSES_BEFORE_COMPILING = 2000  # after this number of decoder passes, compiling a layer pays
MOST_SHAPES = 256  # number of shapes whose compiled layers are kept
COMPILE = "T5_COMPILE"  # set by the user, for a CPU: 0 never compiles, 1 compiles at once
Layer = Callable[..., mx.array]


def for_pass(layer: Layer, config: T5Config, slots: Any, passes: int) -> Layer:
    """The layer for a pass over these slots, compiled if there have been enough passes."""
    # In exact decoding each row has its own number of keys: too many combinations of shapes.
    if passes < passes_before_compiling() or failures() or not isinstance(slots, Slots):
        return partial(layer, config)
    shapes = slots.positions.shape, slots.keys[0].shape, slots.cross[0][0].shape
    return _compiled(layer, config, slots.seen, *shapes, slots.mask is None)


@cache
def passes_before_compiling() -> float:
    """The number of passes after which layers are compiled; infinity if they never are."""
    wish = os.environ.get(COMPILE, "")
    if wish not in ("", "0", "1"):
        raise UserError(f"{COMPILE} must be 0 or 1, not {wish:.40}")
    if not cpu_only():
        return 0 if on_cpu() else PASSES_BEFORE_COMPILING  # T5_REHEARSE compiles at once
    reason = "" if shutil.which("g++") else "there is no g++"
    if wish == "0" or (reason and wish != "1"):
        return math.inf
    if reason := reason or why_not_compiled(kernel_folder()):
        log(f"note: layers are not compiled: {reason}")
        return math.inf
    return 0 if wish == "1" else PASSES_BEFORE_COMPILING


def kernel_folder() -> Path:
    """The folder of a CPU's kernels; as C++'s temp_directory_path, which MLX calls."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    root = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    return Path(root) / "mlx" / mx.__version__ / "cpu"


def why_not_compiled(folder: Path) -> str:
    """Makes the folder of kernels; returns why it cannot be used, or ""."""
    try:
        for path in (folder.parent.parent, folder.parent, folder):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                return f"{path} is no folder"
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
                return f"others may write to {path}; remove it, or set TMPDIR"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


@lru_cache(MOST_SHAPES)
def _compiled(layer: Layer, config: T5Config, seen: int, *shapes: Any) -> Layer:
    # With one function for many shapes, MLX would search its compiled graphs one by one in every
    # call. So each combination has a function of its own, which `lru_cache` finds at once.
    @mx.compile
    def run(blocks: tuple, x, bias, positions, keys, values, cross, mask) -> tuple:
        at, sizes = (positions, NO_QUERIES, None, seen), (len(keys), len(cross[0]))
        slots = Slots([keys], [values], *at, *sizes, [cross], mask)
        x = layer(config, blocks, x, bias, slots, 0)
        return x, slots.keys[0], slots.values[0]

    tried = not cpu_only()

    def compiled(blocks: tuple, x: mx.array, bias: mx.array, slots: Slots, i: int) -> mx.array:
        nonlocal tried
        before, after = (blocks, x, bias, slots.positions), (slots.cross[i], slots.mask)
        keys, values = slots.keys[i], slots.values[i]
        if not tried:  # with empty slots, so that a compiler that fails harms no text
            empty = mx.zeros_like(keys), mx.zeros_like(values)
            tried = _succeeds(lambda: mx.eval(run(*before, *empty, *after)))
        if not tried:
            return layer(config, blocks, x, bias, slots, i)
        x, slots.keys[i], slots.values[i] = run(*before, keys, values, *after)
        return x

    return compiled


def _succeeds(trial: Callable[[], None]) -> bool:
    if failures():
        return False
    try:
        trial()
    except RuntimeError as error:
        failures().append(str(error).strip().splitlines()[-1])
        log(f"note: layers are not compiled: {failures()[0]:.200}")
    return not failures()


@cache
def failures() -> list[str]:
    """Why compiling failed in this process; empty if it did not."""
    return []


def compile_at_once(*models: Any) -> None:
    """Makes GPUs compile the models' decoder layers in the next pass: for many passes to come."""
    for model in models:
        if hasattr(model, "decoder_passes"):
            model.decoder_passes += PASSES_BEFORE_COMPILING


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
