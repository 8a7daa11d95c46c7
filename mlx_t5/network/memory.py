"""Estimates the memory of models and prompts, checks that it is free, and wires it on a Mac.

macOS may evict a GPU's memory between two passes; a model that nearly fills the machine then
runs at a fraction of its speed (ml-explore/mlx-examples#1061). From macOS 15 on, MLX can keep its
memory resident ("wire" it), up to a limit that is 0 at first. Other devices need nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlx_t5.backend import cpu_only, device_info, mx, on_cpu
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.reading import EMBEDDINGS, Weights, read_weights, type_name
from mlx_t5.errors import readable
from mlx_t5.grouping import PASS_POSITIONS, by_length
from mlx_t5.network.bias import queries_at_once
from mlx_t5.network.cache import round_up, source_width

SHARE = 0.9  # share of a CPU's memory to use, or of a Mac's working set to use without a warning
WORKING_SET = "max_recommended_working_set_size"  # Metal's name for it; other devices have none
SLACK = 64 << 20  # buffers are rounded up to pages, and a heap of small buffers counts in full
KEPT, KEPT_SHARE = 256 << 20, 0.25  # limits of MLX's buffer cache: bytes, share of free memory
MEBIBYTE = 1 << 20
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def limit() -> int:
    facts = device_info()
    for name in (WORKING_SET, "total_memory", "memory_size"):
        if facts.get(name):
            return int(facts[name])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(SHARE * min([machine, *cgroup_limits()]))


@cache
def cgroup_limits(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[int, ...]:
    """The limits, in bytes, of a container or a batch job: of its control group and all parents."""
    limits: list[int] = []
    with suppress(OSError):  # not Linux
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue  # another hierarchy of version 1
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            top = root / "memory" if controllers else root
            # In a container, the path may be the host's; then only the top has the file.
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    with suppress(OSError, ValueError):  # "max": no limit
                        limits.append(int((folder / name).read_text()))
    return tuple(limits)


def free() -> int:
    return limit() - mx.get_active_memory()


def require(needed: int) -> None:
    """Raises RuntimeError, as MLX does when it cannot allocate, unless `needed` bytes are free."""
    if needed > free():
        raise RuntimeError(f"needs {readable(needed)}, and {readable(max(free(), 0))} are left")


def wire(needed: int) -> None:
    """Makes macOS keep MLX's memory resident: the memory in use and the next `needed` bytes."""
    most = device_info().get(WORKING_SET)
    if most:
        # Freed buffers that MLX keeps for reuse stay wired, so they count. Otherwise a later call
        # with a smaller `needed` could make MLX unwire weights.
        held = mx.get_active_memory() + mx.get_cache_memory() + SLACK
        mx.set_wired_limit(min(int(most), held + needed))


@contextmanager
def room_for_weights(needed: int) -> Iterator[None]:
    """Wires `needed` bytes for loading weights; then frees the buffers left over."""
    wire(needed)
    try:
        yield
    finally:
        mx.clear_cache()
    wire(0)  # again: now that buffers are freed, there may be room for all weights


def keep_buffers(needed: int) -> None:
    """Limits MLX's cache of freed buffers, which similar prompts reuse."""
    # Without a GPU, MLX's limit of 32 MB stays. Metal allocates a Mac's memory for the CPU as well.
    if mx.metal.is_available() or not cpu_only():
        mx.set_cache_limit(max(KEPT, int(KEPT_SHARE * (free() - needed))))


def require_for(
    models: Sequence[Any],
    new: Sequence[Any],
    running: Sequence[Any],
    ahead: Sequence[Any] = (),
    beams: int = 1,
) -> None:
    """Raises RuntimeError unless there is memory to encode new rows and to decode them all.

    Memory for a cache of all rows must be free beside the running one, as joining rows copies it;
    it is also wired on a Mac. `ahead` are rows that are encoded now, but join later.
    """
    rows = [*running, *new]
    source = source_width(max(len(row.ids) for row in rows))
    target = max(row.settings.max_tokens for row in rows)
    sources = {tuple(row.ids) for row in (*new, *ahead)}  # equal sources are encoded once
    lengths = [len(ids) for ids in sources]
    groups = list(by_length(lengths, len(lengths), PASS_POSITIONS))  # as in `encoder_states`
    needed = sum(
        model.cache_memory(len(rows), source, target, beams * len(rows))
        + max(model.encoder_memory(len(g), source_width(lengths[g[0]])) for g in groups)
        for model in models
        if model
    )
    require(needed)
    keep_buffers(needed)
    wire(needed)


def longest_text(models: Sequence[Any], tokens: int, rows: int, beams: int, space: int) -> int:
    """Lowers `tokens`, the maximum of a text, if not even one such text fits into `space` bytes.

    After that, the caches of `rows` texts take at most half of the space.
    """

    def texts(rows: int, tokens: int) -> int:
        return sum(model.cache_memory(rows, 0, tokens, beams * rows) for model in models if model)

    if texts(1, tokens) > space:
        while tokens > 1 and texts(rows, tokens) > space // 2:
            tokens //= 2
    return tokens


def cache_bytes(
    config: T5Config, width: int, prompts: int, source: int, target: int, rows: int = 0
) -> int:
    """The size of a decoder's cache, with `width` bytes a number; 0 rows: as many as prompts."""
    slots = prompts * source + max(rows, prompts) * round_up(target)
    return 2 * config.num_decoder_layers * config.num_heads * config.d_kv * slots * width


def encoder_bytes(config: T5Config, width: int, rows: int, source: int) -> int:
    """Estimates the peak size of the encoder's activations, with `width` bytes a number."""
    # Five times the sum of one layer's scores (of a chunk), hidden units, residual and heads, as
    # measured on a CPU. Kernels that do not store the scores need less.
    heads = config.num_heads
    scores = heads * min(source, queries_at_once(rows, heads, source))
    features = (1 + config.is_gated_act) * config.d_ff + config.d_model + heads * config.d_kv
    return 5 * width * rows * source * (scores + features)


def folder_bytes(folder: Path, dtype: str | mx.Dtype | None) -> int:
    """The size of a model folder's weights once they are loaded in `dtype`."""
    weights, _ = read_weights(folder)
    return weights_bytes(weights, dtype or ("float32" if on_cpu() else None))


def weights_bytes(weights: Weights, dtype: str | mx.Dtype | None) -> int:
    """The size of weights in the type `dtype`; None keeps their own types."""
    total, requested = 0, None if dtype is None else WIDTHS[str(dtype).removeprefix("mlx.core.")]
    for name, tensor in weights.items():
        if name in EMBEDDINGS[1:] and EMBEDDINGS[0] in weights:
            continue  # another copy of the embedding
        width = WIDTHS.get(type_name(tensor.dtype))  # None for the integers of quantized weights
        total += math.prod(tensor.shape) * (requested or width) if width else tensor.nbytes
    return total


def warning(folders: Sequence[Path], dtype: str | None) -> str | None:
    """A warning if the models' weights barely fit into memory or do not fit, else None."""
    needed, there = sum(folder_bytes(folder, dtype) for folder in folders), limit()
    facts = device_info()
    # Near macOS's recommended limit the GPU slows down; it can be raised if the machine has more.
    comfortable = SHARE * there if facts.get(WORKING_SET) else there
    if needed <= comfortable:
        return None
    cure = "convert the model with --quantize, or take a smaller one"
    space = f"there are {readable(there)} of memory"
    if facts.get(WORKING_SET):
        space = f"macOS recommends at most {readable(there)} for the GPU (iogpu.wired_limit_mb)"
        raised = math.ceil(needed / SHARE / MEBIBYTE)
        if raised * MEBIBYTE < SHARE * facts.get("memory_size", 0):
            cure += (
                f", or raise that until the next start: sudo sysctl iogpu.wired_limit_mb={raised}"
            )
    return f"the weights take {readable(needed)}, and {space}; {cure}"
