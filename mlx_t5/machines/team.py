"""The ranks that `mlx.launch` has started: how they find each other, and how they end.

Rank 0 reads and writes; the others are silent. An error anywhere, a rank that is lost and Ctrl-C
end all of them, with one line of rank 0's. What ends is the process: a thread that waits in a
collective cannot be told to stop.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_t5.errors import UserError, is_lost_rank, is_out_of_memory
from mlx_t5.machines import launched, link

BAD_INPUT = 2  # exit status
KEY_BYTES = 16  # of the key that rank 0 makes and tells the others through the group
MEANWHILE = 0.5  # seconds in which rank 0 finds the same error, if it is not this rank's alone


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None, into: Any = None) -> Any:
    """Parses a command line, without a word where this is another rank than 0.

    Args:
        parser: of the command line.
        argv: the arguments; None takes the process's own.
        into: the namespace to fill, if there is one.
    """
    if launched.alone(os.environ) or launched.rank_of(os.environ).leads:
        return parser.parse_args(argv, into)
    nowhere = io.StringIO()
    with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        return parser.parse_args(argv, into)


def join(environment: Mapping[str, str]) -> Team | None:
    """Joins the ranks that `mlx.launch` has started; None if this process is alone.

    From here on this process writes nothing, if it is another rank than 0.

    Raises:
        UserError: the ranks cannot reach each other.
    """
    if launched.alone(environment):
        return None
    rank = launched.rank_of(environment)
    quieten(rank.number)
    return Team(rank.addresses[0][0])


def quieten(rank: int) -> None:
    """Silences all ranks but 0, and of 0 what libraries write to standard error.

    A ring writes there ten times that a peer has gone. Errors are told by rank 0 in a line.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(2)
    os.dup2(null, 2)
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says what becomes of it
        os.dup2(null, 1)
    else:
        sys.stderr = open(kept, "w", encoding="utf-8", errors="backslashreplace", buffering=1)


class Team:
    """This rank and its connections.

    Attributes:
        group: of `mx.distributed`.
        rank: this one's number.
        size: how many there are.
    """

    def __init__(self, address: str) -> None:
        """Joins the group, then connects rank 0 and each of the others.

        Args:
            address: rank 0's.

        Raises:
            UserError: the others cannot be reached.
        """
        try:
            self.group = _group()
            self.rank, self.size = self.group.rank(), self.group.size()
            self._messages: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
            self._lock = threading.Lock()
            self._connect(address)
        except (RuntimeError, *link.BROKEN) as error:
            reason = str(error).split("\n")[0]
            raise UserError(f"the ranks cannot reach each other ({reason}); start again") from None

    def _connect(self, address: str) -> None:
        from mlx_t5.backend import mx
        from mlx_t5.network.ranks import Ranks

        key, port, sock = secrets.token_bytes(KEY_BYTES), 0, None
        if self.rank == 0:
            sock = link.listening((address, 0))
            port = sock.getsockname()[1]
        secret = mx.array([*key, *port.to_bytes(2, "big")], mx.int32)
        shared = bytes(Ranks(self.group).of_first(secret).tolist())
        key, port = shared[:KEY_BYTES], int.from_bytes(shared[KEY_BYTES:], "big")
        if sock:
            peers = link.gather(sock, key, self.size)
            self._peers = list(peers.values())
            for rank, peer in peers.items():
                self._watch(rank, peer)
        else:
            self._peers = [link.join((address, port), key, self.rank)]
            self._peers[0].listen(self._messages.put, lambda _: os._exit(0))

    def _watch(self, rank: int, peer: link.Connection) -> None:
        """Ends all with the error that another rank tells, or when it is lost."""
        told = lambda message: self._end(f"rank {rank}: {message}")  # noqa: E731
        lost = lambda _: self._end(f"rank {rank} was lost; start again")  # noqa: E731
        peer.listen(told, lost)

    def _end(self, message: str) -> None:
        """Ends this process, and with it all others, with one line."""
        if self._lock.acquire(blocking=False):  # the first tells
            print(f"error: {UserError(message)}", file=sys.stderr, flush=True)
            os._exit(BAD_INPUT)

    def tell(self, message: list[Any]) -> None:
        """Sends a message of rank 0 to all others."""
        for peer in self._peers:
            peer.send(message)

    def next_message(self) -> list[Any]:
        """Waits for what rank 0 tells this one."""
        return self._messages.get()

    def follow(self, begin: Callable[[], Callable[..., None]]) -> int:
        """Does what rank 0 tells, until it ends; an error here is told to it.

        Args:
            begin: loads this rank's part of the target; returns what does a message, see
                `leader.Follower`.
        """
        try:
            do = begin()
            while True:
                do(*self.next_message())
        except BaseException as error:
            if not is_lost_rank(error):
                time.sleep(MEANWHILE)
                self._peers[0].send(_told(error))
        time.sleep(2 * link.SILENCE)  # rank 0 ends, and with it this process
        return BAD_INPUT


def _group() -> Any:
    """The group, whose ranks may begin at different times; a ring gives up after a few seconds."""
    from mlx_t5.backend import mx

    end = time.monotonic() + link.JOINING
    while True:
        try:
            return mx.distributed.init(strict=True)
        except RuntimeError:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def _told(error: BaseException) -> str:
    """One line about what has gone wrong on another rank than 0."""
    reason = str(error).split("\n")[0]
    if isinstance(error, (UserError, OSError)):
        return reason
    return f"out of memory ({reason})" if is_out_of_memory(error) else f"internal error: {error!r}"
