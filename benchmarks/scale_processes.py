"""The ranks of `scale`: processes of this machine, what connects them, how they are called."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import printing
from benchmarks.peer_process import Process
from mlx_t5.timing import Ratio

SHARE: printing.Columns = {
    "ranks": lambda row: str(row["ranks"]),
    "ranks a core": lambda row: f"{row['ranks_a_core']:g}",
}


@contextlib.contextmanager
def group(what: str, ranks: int, **keywords: Any) -> Iterator[list[Process]]:
    """Ranks that share a model, connected in a ring on this machine.

    Args:
        what: MODULE:CLASS of a rank.
        ranks: how many.
        keywords: what each is made with, beside its number.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(ranks)]))
        several = {"MLX_HOSTFILE": str(hosts)} if ranks > 1 else {"MLX_HOSTFILE": ""}
        yield [
            stack.enter_context(
                Process(what, {"MLX_RANK": str(rank), **several}, rank=rank, **keywords)
            )
            for rank in range(ranks)
        ]


def together(processes: Sequence[Process], method: str, **keywords: Any) -> list[Any]:
    """Calls a method of all processes at the same time.

    Raises:
        UserError: of the first that failed. The others are ended, as they may wait for it.
    """
    with ThreadPoolExecutor(len(processes)) as pool:
        calls = [pool.submit(each.call, method, **keywords) for each in processes]
        try:
            for call in as_completed(calls):
                call.result()
        except BaseException:
            for process in processes:
                process.end()
            raise
    return [call.result() for call in calls]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def ranks_a_core(ranks: int, cores: int) -> float:
    """How many ranks share a core; 1 if each has `cores` of its own."""
    return max(1.0, ranks * cores / (os.cpu_count() or 1))


def ratio(base: Sequence[float], own: Sequence[float]) -> Ratio:
    """How many times as fast, by medians and by the single repeats."""
    single = [theirs / ours for theirs, ours in zip(base, own, strict=True)]
    return Ratio(statistics.median(base) / statistics.median(own), min(single), max(single))
