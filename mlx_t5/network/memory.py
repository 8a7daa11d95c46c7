"""How much memory models and prompts take, how much there is, and what stays there on a Mac.

macOS may take memory out of the GPU's reach between two passes; a model that nearly fills the
machine then computes at a fraction of its speed (ml-explore/mlx-examples#1061). From macOS 15 on,
MLX can keep ("wire") what it holds, up to a limit that is 0 at first. `wire` raises it to what
weights and caches need. Only Metal names a working set, so nothing is wired elsewhere.

A decoder holds of a prompt its caches: keys and values of the source, for cross-attention, and of
what is written. Besides, the encoder's work counts while it reads.

Symbols: B rows, P prompts, S source positions, T target positions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_t5.backend import cpu_only, device_info, mx, on_cpu
from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint, stored_dtype
from mlx_t5.grouping import PASS_POSITIONS
from mlx_t5.network.attention import queries_at_once
from mlx_t5.network.cache import round_up, source_width
from mlx_t5.network.config import T5Config
from mlx_t5.network.ranks import ALONE, Ranks, ranks_of
from mlx_t5.sizes import readable

SHARE = 0.9  # of a CPU's memory that may be used, and of what a GPU recommends without a warning
WORKING_SET = "max_recommended_working_set_size"  # what Metal calls it; other devices have none
SLACK = 64 << 20  # buffers are rounded up to pages, and small ones lie in a heap that counts whole
KEPT, KEPT_SHARE = 256 << 20, 0.25  # freed buffers that MLX keeps: bytes, share of what is free
MEBIBYTE = 1 << 20
HEADS = "lm_head."  # how tensors of an output head begin, if that is not the embedding
WIDTHS = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})


def limit() -> int:
    """Bytes that may be used: what the GPU recommends or has, else most of the machine's memory."""
    facts = device_info()
    for name in (WORKING_SET, "total_memory", "memory_size"):
        if facts.get(name):
            return int(facts[name])
    return int(SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def require(needed: int, ranks: Ranks = ALONE) -> None:
    """Checks that so many bytes are free, on each of the ranks that are to compute together.

    Raises:
        RuntimeError: they are not, as when MLX cannot allocate.
    """
    free = limit() - mx.get_active_memory()
    if ranks.any(needed > free):
        cause = f"{readable(max(free, 0))} are left" if needed > free else "another rank has less"
        raise RuntimeError(f"needs {readable(needed)}, and {cause}")


def wire(needed: int) -> None:
    """Has macOS leave in the GPU's reach what MLX holds now and the next bytes that it allocates.

    The limit counts buffers that MLX keeps for reuse as well, so a lower one than before never
    takes a weight out.

    Args:
        needed: bytes to come; what macOS recommends is the most in any case.
    """
    most = device_info().get(WORKING_SET)
    if most:
        held = mx.get_active_memory() + mx.get_cache_memory() + SLACK
        mx.set_wired_limit(min(int(most), held + needed))


@contextmanager
def room_for_weights(needed: int) -> Iterator[None]:
    """Wires so many bytes of weights that are loaded inside; no buffer is left but theirs."""
    wire(needed)
    try:
        yield
    finally:
        mx.clear_cache()
    wire(0)  # weights that there was no room for beside buffers that are gone now


def keep_buffers(needed: int) -> None:
    """Has MLX keep freed buffers, as a prompt's work and caches, for the next prompt like it.

    They take `KEPT_SHARE` at most of the memory that these next bytes leave free, and `KEPT` in any
    case; those unused for longest go first. Without a GPU MLX keeps 32 MB, but a Mac's allocator is
    Metal's also when its CPU computes.
    """
    if mx.metal.is_available() or not cpu_only():
        free = limit() - mx.get_active_memory() - needed
        mx.set_cache_limit(max(KEPT, int(KEPT_SHARE * free)))


def require_for(
    models: Sequence[Any],
    new: Sequence[Any],
    running: Sequence[Any],
    ahead: Sequence[Any] = (),
    copies: int = 1,
) -> None:
    """Checks that there is room to encode new rows and to decode them beside the running ones.

    On a Mac that much is wired, too. Of what else is free, some is for buffers that are kept.

    The space is needed on top of what is held now, as the cache that they join is copied.

    Args:
        models: target and draft; None where there is none.
        new: rows, as of `rows.Row`.
        running: likewise.
        ahead: likewise, to be encoded only. They fill up a pass, whose work takes several times the
            memory of the states that it leaves behind.
        copies: sequences of each row that are decoded, its beams.

    Raises:
        RuntimeError: there is not.
    """
    rows = [*running, *new]
    source = source_width(max(len(row.ids) for row in rows))
    target = max(row.settings.max_tokens for row in rows)
    sources = {tuple(row.ids) for row in (*new, *ahead)}  # equal ones are encoded once
    longest = source_width(max(map(len, sources)))
    together = min(len(sources), -(-PASS_POSITIONS // longest))  # in the largest pass
    needed = sum(
        model.cache_memory(len(rows), source, target, copies * len(rows))
        + model.encoder_memory(together, longest)
        for model in models
        if model
    )
    require(needed, ranks_of(models[0]))
    keep_buffers(needed)
    wire(needed)


def cache_bytes(
    config: T5Config, width: int, prompts: int, source: int, target: int, rows: int = 0
) -> int:
    """Bytes of a decoder's caches.

    Args:
        config: of the model.
        width: bytes of a number.
        prompts: P.
        source: S.
        target: T.
        rows: B, if more than one of a prompt are decoded.
    """
    slots = prompts * source + max(rows, prompts) * round_up(target)
    return 2 * config.num_decoder_layers * config.num_heads * config.d_kv * slots * width


def encoder_bytes(config: T5Config, width: int, rows: int, source: int) -> int:
    """Bytes that the encoder takes at work, at most.

    That was measured without a GPU: four times a layer's scores, hidden layer, residual and heads.
    A GPU does not keep the scores. Those of long sources are there a chunk of queries at a time.
    """
    heads = config.num_heads
    scores = heads * min(source, queries_at_once(rows, heads, source))
    others = (
        (1 + config.is_gated_act) * config.d_ff + config.d_model + config.num_heads * config.d_kv
    )
    return 4 * width * rows * source * (scores + others)


def stored_bytes(folder: Path, dtype: str | mx.Dtype | None, prefix: str = "") -> int:
    """Bytes that the weights of a model folder take once they are loaded.

    Args:
        folder: MLX or Hugging Face.
        dtype: what to compute in; None is the folder's, and float32 on the CPU.
        prefix: with which the names of the tensors that count begin, such as `HEADS`.

    Raises:
        UserError: the folder holds no readable checkpoint.
    """
    with open_checkpoint(folder) as stored:
        return loaded_bytes(stored, dtype, prefix)


def loaded_bytes(stored: Checkpoint, dtype: str | mx.Dtype | None, prefix: str = "") -> int:
    """`stored_bytes` of an open checkpoint."""
    requested = str(dtype).removeprefix("mlx.core.") if dtype else "float32" if on_cpu() else None
    names = [name for name in stored.names if name.startswith(prefix)]
    total = 0
    for name in {stored.storage(name): name for name in names}.values():  # each once
        if (dtype_there := stored.dtype(name)) in WIDTHS:
            total += math.prod(stored.shape(name)) * WIDTHS.get(requested or dtype_there, 4)
        else:  # quantised
            total += stored.nbytes(name)
    return total


def warning(
    folders: Sequence[Path], dtype: str | None, ranks: int = 1, whole_head: bool = False
) -> str | None:
    """One line about models that do not fit into memory together, or hardly; None if they do.

    A Mac's GPU slows down near the working set that macOS recommends. How much that is can be set.

    Args:
        folders: the target's, and the draft's if there is one.
        dtype: as for `stored_bytes`.
        ranks: that share the target.
        whole_head: whether its whole output head is here besides, for a draft that uses it.
    """
    target, *others = (stored_bytes(folder, dtype) for folder in folders)
    others += [stored_bytes(folders[0], dtype, HEADS)] if whole_head else []
    needed, there = target // ranks + sum(others), limit()
    facts = device_info()
    comfortable = SHARE * there if facts.get(WORKING_SET) else there
    if needed <= comfortable:
        return None
    cure = "convert the model with --quantize, or take a smaller one"
    if not facts.get(WORKING_SET):
        space = f"there are {readable(there)} of memory"
        return f"the weights take {readable(needed)}, and {space}; {cure}"
    raised = math.ceil(needed / SHARE / MEBIBYTE)
    if raised * MEBIBYTE < SHARE * facts.get("memory_size", 0):
        cure += f", or raise that until the next start: sudo sysctl iogpu.wired_limit_mb={raised}"
    space = f"macOS recommends at most {readable(there)} for the GPU (iogpu.wired_limit_mb)"
    return f"the weights take {readable(needed)}, and {space}; {cure}"


def dtype_hint(folder: Path, dtype: str | None) -> str | None:
    """One line about a Hugging Face folder that a GPU would compute with in float32, unasked.

    Args:
        folder: of a model.
        dtype: the type asked for; None is the folder's.

    Raises:
        UserError: the folder holds no readable checkpoint.
    """
    if on_cpu() or dtype:
        return None
    with open_checkpoint(folder) as stored:
        if stored.metadata.get("format") == "mlx" or stored_dtype(stored) != "float32":
            return None
    return f"{folder} is in float32; --dtype bfloat16 takes half the memory"
