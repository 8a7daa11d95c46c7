"""The machine's memory: how much is free, what MLX keeps of it, and what macOS may evict.

macOS may evict a GPU's memory between two passes; a model that nearly fills the machine then
runs at a fraction of its speed (ml-explore/mlx-examples#1061). From macOS 15 on, MLX can keep its
memory resident ("wire" it), up to a limit that is 0 at first. Other devices need nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from mlx_t5.backend import cpu_only, device_info, mx
from mlx_t5.errors import readable

SHARE = 0.9  # share of a CPU's memory to use, or of a Mac's working set to use without a warning
WORKING_SET = "max_recommended_working_set_size"  # Metal's name for it; other devices have none
SLACK = 64 << 20  # buffers are rounded up to pages, and a heap of small buffers counts in full
KEPT, KEPT_SHARE = 256 << 20, 0.25  # limits of MLX's buffer cache: bytes, share of free memory


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
def wired_limit(needed: int) -> Iterator[None]:
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
