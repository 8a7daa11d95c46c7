"""Connects processes that `mlx.launch` starts, compares their jobs, and makes them print as one.

Each process is a rank. Rank 0 reads the input and writes the output; other ranks are silent. A
rank that fails exits with a status that is not 0, and `mlx.launch` then ends all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mlx_t5.errors import UserError, is_lost_rank, is_out_of_memory, reason, shown

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from mlx_t5.network.ranks import Ranks

Options = TypeVar("Options")
PLACES = ("model", "draft_model", "adapter_path")  # options with paths, which may differ
CURE = "start all ranks with the same options, models and versions"
LAUNCH = "mlx.launch -n 2 -- python main.py …"
BAD_INPUT, INTERRUPTED = 2, 130  # exit statuses
JOINING = 60.0  # seconds for all ranks to connect; one attempt of MLX's ring lasts a few seconds
MEANWHILE = 2.0  # seconds for rank 0 to report the same error and the launcher to end all ranks


def rank_of(environment: Mapping[str, str]) -> int | None:
    """Returns the rank of this process; None if `mlx.launch` has not started it.

    Raises:
        UserError: the variable MLX_RANK is no number.
    """
    text = environment.get("MLX_RANK")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"MLX_RANK is {shown(text)!r}, which is no number; start with: {LAUNCH}")
    return int(text)


class Disagreement(UserError):
    """The error that all ranks raise if a rank has failed or has a different job.

    Rank 0 prints the error.
    """


def one_voice(options: Callable[[], Options], command: Callable[[Options], int]) -> int:
    """Runs a command so that only rank 0 prints.

    Any other rank prints only an error that rank 0 does not report. Messages of libraries are
    hidden, because MLX's ring backend would say ten times that another rank has ended.

    Args:
        options: a function that parses and checks the command line, which is the same on all ranks.
        command: a function that does the work and returns an exit status.

    Returns:
        The exit status.
    """
    rank = rank_of(os.environ)
    if rank is None:
        return command(options())
    log = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    if rank == 0:
        sys.stderr = log
        return command(options())
    os.dup2(null, 1)
    try:
        parsed = options()
    except BaseException as error:
        time.sleep(MEANWHILE)
        return error.code if isinstance(error, SystemExit) else BAD_INPUT  # type: ignore[return-value]
    try:
        return command(parsed)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        time.sleep(MEANWHILE)
        if not (isinstance(error, Disagreement) or is_lost_rank(error)):
            expected = isinstance(error, (UserError, OSError)) or is_out_of_memory(error)
            cause = reason(error) if expected else f"internal error: {error!r}"
            print(f"error: {UserError(f'rank {rank}: {cause}')}", file=log, flush=True)
        return BAD_INPUT


def join_ranks() -> Ranks:
    """Connects this process to the other ranks.

    Returns:
        The ranks; `ALONE` unless `mlx.launch` started several processes.

    Raises:
        UserError: the ranks cannot reach each other.
    """
    from mlx_t5.backend import mx
    from mlx_t5.network.ranks import ALONE, Ranks

    hosts = Path(os.environ.get("MLX_HOSTFILE", ""))
    if rank_of(os.environ) is None or (hosts.is_file() and not hosts.read_bytes().strip()):
        return ALONE  # the launcher's host file is empty if it started one process
    end = time.monotonic() + JOINING
    while True:
        try:
            return Ranks(mx.distributed.init(strict=True))
        except RuntimeError as error:
            if time.monotonic() > end:
                cause = f"ranks cannot reach each other ({shown(reason(error))})"
                raise UserError(f"{cause}; start with: {LAUNCH}") from None
        time.sleep(0.5)


def leave_interrupts_to_rank_0(ranks: Ranks) -> None:
    """Makes all ranks except rank 0 ignore Ctrl-C, so that they finish what rank 0 waits for."""
    if ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def to_compare(decoder: SpeculativeDecoder, options: Mapping[str, object]) -> dict[str, str]:
    """Returns named facts, which must be equal on all ranks before a forward pass.

    Ranks with models of different shapes would wait for each other forever. The models' paths may
    differ. Other machines get only a digest of the options, as options may contain an API key.
    """
    from mlx_t5.backend import cpu_only, mx

    draft = decoder.drafter and decoder.drafter.model
    relevant = sorted((name, str(value)) for name, value in options.items() if name not in PLACES)
    return {
        "version of MLX": mx.__version__,
        "kind of device": str(cpu_only()),  # decides how arrays are padded
        "set of options": hashlib.sha256(repr(relevant).encode()).hexdigest(),
        "dtype (see --dtype)": str(decoder.model.dtype),
        "config of the target": str(decoder.model.config),
        "kind of draft": type(decoder.drafter).__name__,
        "config of the draft": str(draft and draft.config),
    }


@contextlib.contextmanager
def agreeing(ranks: Ranks) -> Iterator[dict[str, str]]:
    """Runs a block on all ranks, and raises the same error on all if the block fails on any.

    Within the block the ranks must not communicate.

    Yields:
        An empty dictionary, into which the block writes facts that must be equal on all ranks.

    Raises:
        Disagreement: a rank has failed, or its facts differ from rank 0's. With one process, the
            original error is raised instead.
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
    for rank, (cause, _) in enumerate(reports):
        if cause is not None:
            raise Disagreement(f"rank {rank}: {cause}" if rank else cause) from failed
    for rank, (_, reported) in enumerate(reports):
        for name, fact in reports[0][1].items():
            if reported.get(name) != fact:
                raise Disagreement(f"rank {rank} has another {name} than rank 0; {CURE}")


def _told(error: BaseException) -> str:
    return "out of memory" if is_out_of_memory(error) else reason(error)
