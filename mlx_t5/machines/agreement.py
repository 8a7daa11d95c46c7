"""Stages that all ranks leave together, in agreement, or none: the error of one ends all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_t5.errors import UserError, is_out_of_memory

if TYPE_CHECKING:
    from mlx_t5.network.ranks import Ranks

CURE = "start all ranks with the same options, models and versions"


class Disagreement(UserError):
    """What all ranks end with, as one of them has failed or has another job; rank 0 tells it."""


@contextlib.contextmanager
def agreeing(ranks: Ranks) -> Iterator[dict[str, str]]:
    """A stage in which ranks compute nothing together, and which all of them leave or none.

    Yields:
        What has to be the same everywhere, by name, to be filled in.

    Raises:
        Disagreement: a rank has failed, or has something else than rank 0. A process alone raises
            what it has failed with.
    """
    facts: dict[str, str] = {}
    failed: BaseException | None = None
    try:
        yield facts
    except (UserError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if ranks.size == 1:
            raise
        failed = error
    reports = ranks.gathered([None if failed is None else _told(failed), facts])
    for rank, (reason, _) in enumerate(reports):
        if reason is not None:
            raise Disagreement(f"rank {rank}: {reason}" if rank else reason) from failed
    for rank, (_, reported) in enumerate(reports):
        for name, fact in reports[0][1].items():
            if reported.get(name) != fact:
                raise Disagreement(f"rank {rank} has another {name} than rank 0; {CURE}")


def _told(error: BaseException) -> str:
    reason = str(error).split("\n")[0] or type(error).__name__
    return f"out of memory ({reason})" if is_out_of_memory(error) else reason
