"""How ranks talk: rank 0 listens, the others come, take blocks and bring them back.

Messages are JSON in the frames of `multiprocessing.connection`; nothing is ever unpickled. Both
ends prove that they know the job's key (`deliver_challenge`, HMAC), and both say that they are
alive while there is nothing else to say. So a rank that is silent for `PATIENCE` seconds is lost,
whatever has happened to its machine.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any

from mlx_t5.errors import UserError, shown
from mlx_t5.machines.blocks import HELD, Block, Blocks
from mlx_t5.machines.launched import KEY, Address, Rank
from mlx_t5.machines.messages import Codec, difference, packed_item, unpacked_item

PATIENCE = 30.0  # seconds without a word after which the other end is lost
BEAT = 5.0  # seconds between words where there is nothing to say
LOADING = 1800.0  # seconds that rank 0 may take to load its model after it has begun to listen
JOINING = 60.0  # seconds in which every rank is expected to find rank 0
POLL = 0.1  # seconds between looks at what there is to give
LARGEST = 1 << 28  # bytes of a message
BROKEN = (EOFError, OSError, ValueError, TypeError, LookupError, AuthenticationError)

AGAIN = "start again with --resume to go on where the output ends"


class Lost(UserError):
    """Rank 0 is gone."""


def connection_of(opened: socket.socket, patience: float) -> Connection:
    """Frames over a connected socket, none of whose transfers waits longer than this."""
    limit = struct.pack("@ll", int(patience), 0)  # struct timeval
    opened.setblocking(True)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(opened.detach())


def send(connection: Connection, **message: Any) -> None:
    """Sends an object."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Receives an object.

    Raises:
        ValueError: it is none.
    """
    try:
        message = json.loads(connection.recv_bytes(LARGEST))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


class BlockServer:
    """Rank 0's end: a thread for each rank that comes. A context manager.

    Attributes:
        seen: the ranks that have come.
    """

    def __init__(
        self,
        rank: Rank,
        tell: Callable[[str], None],
        verbose: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        """Listens, so that the others may come while the model is still being loaded.

        Args:
            rank: 0, with the addresses to listen at and the key.
            tell: shows a line: of ranks that are lost, and of those that come.
            verbose: whether the latter are to be shown.
            patience: seconds without a word after which a rank is lost.

        Raises:
            UserError: an address is taken or not this machine's.
        """
        self._rank, self._tell, self._verbose, self._patience = rank, tell, verbose, patience
        self._began, self._ended = time.monotonic(), False
        self.seen: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._sockets = [_listening(address) for address in rank.addresses]

    def share(self, blocks: Blocks, job: Mapping[str, str], codec: Codec) -> None:
        """Begins to give blocks to the ranks that have the same job."""
        for listening in self._sockets:
            self._start(self._accept, listening, blocks, job, codec)

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Lets the other ranks go; those that have not come yet are waited for, if all is well."""
        while kind is None and len(self.seen) < self._rank.size - 1:
            if not self._sockets or time.monotonic() - self._began > JOINING:
                break
            time.sleep(POLL)
        self._ended = True
        for listening in self._sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # ends the wait in `accept`
            listening.close()
        end = time.monotonic() + 2
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket, *job: Any) -> None:
        while not self._ended:
            try:
                opened, _ = listening.accept()
            except OSError:
                return
            self._start(self._serve, opened, *job)

    def _serve(
        self, opened: socket.socket, blocks: Blocks, job: Mapping[str, str], codec: Codec
    ) -> None:
        """Serves one rank until it or the job ends."""
        with connection_of(opened, self._patience) as connection:
            name = None
            try:
                deliver_challenge(connection, self._rank.key)
                answer_challenge(connection, self._rank.key)
                hello = receive(connection)
                number = hello.get("rank")
                if type(number) is not int or not 0 < number < 1 << 16:
                    return
                if other := difference(job, hello.get("job")):
                    send(connection, refused=other)
                    return
                name = f"{number}.{len(self._threads)}"
                send(connection, welcome=True)
                self.seen.add(number)
                if self._verbose:
                    self._tell(f"rank {number} joins")
                left = self._give(connection, name, blocks, codec)
            except BROKEN as error:
                left = False
                reason = str(error) or "it closed the connection"
            if name:
                blocks.lose(name)
                if not (left or self._ended):
                    self._tell(f"rank {number} is lost ({reason}); the others do its prompts")

    def _give(self, connection: Connection, name: str, blocks: Blocks, codec: Codec) -> bool:
        """Gives blocks and takes outcomes; returns at the end, or when the rank says goodbye."""
        heard = time.monotonic()
        while not self._ended:
            while blocks.held(name) < HELD and (block := blocks.take(name)):
                items = [packed_item(item) for item in block.items]
                send(connection, block=block.number, first=block.first, items=items)
            if connection.poll(POLL):
                message = receive(connection)
                heard = time.monotonic()
                if "done" in message:
                    outcomes = [codec.unpacked(value) for value in message["outcomes"]]
                    blocks.deliver(name, message["done"], outcomes)
                elif "leaves" in message:
                    return True
                else:
                    send(connection, alive=True)
            elif time.monotonic() - heard > self._patience:
                raise OSError(f"silent for {self._patience:.0f} s")
        send(connection, end=True)
        return True


def _listening(address: Address) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        where = f"{shown(address[0])}:{address[1]}"
        reason = error.strerror or str(error)
        cure = "end the other job, or choose another port with mlx.launch --starting-port"
        raise UserError(f"rank 0 cannot listen at {where} ({reason}); {cure}") from None


class BlockClient:
    """Another rank's end. A context manager."""

    def __init__(self, rank: Rank, job: Mapping[str, str], patience: float = PATIENCE) -> None:
        """Finds rank 0.

        Args:
            rank: this one.
            job: what both have to agree about.
            patience: seconds without a word after which rank 0 is lost.

        Raises:
            UserError: rank 0 cannot be found, or has another job or another key.
        """
        self._patience, self._lost, self._ended = patience, "", False
        self._sending = threading.Lock()
        self._received: queue.Queue[Block | None] = queue.Queue()
        self._connection = _found(rank, patience)
        try:
            answer_challenge(self._connection, rank.key)
            deliver_challenge(self._connection, rank.key)
            self._say(rank=rank.number, job=dict(job))
            reply = receive(self._connection)
        except AuthenticationError:
            raise UserError(f"rank 0 has another {KEY}; give all ranks the same") from None
        except BROKEN:
            raise Lost(f"rank 0 has ended; {AGAIN}") from None
        if "refused" in reply:
            other = shown(str(reply["refused"]))
            raise UserError(
                f"rank {rank.number} has another {other} than rank 0; start all ranks with the "
                "same options, models and versions"
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> BlockClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended = True
        with contextlib.suppress(*BROKEN):
            self._say(leaves=True)

    def take(self, wait: bool) -> Block | None:
        """The next block; None at the end, or if there is none and it is not to be waited for.

        Raises:
            Lost: rank 0 is gone.
        """
        while True:
            try:  # short waits, as a Ctrl-C that comes just before one begins does not end it
                block = self._received.get(wait, timeout=0.5)
            except queue.Empty:
                if wait and not self._lost:
                    continue
                block = None
            if self._lost:
                raise Lost(f"rank 0 is lost ({self._lost}); {AGAIN}")
            if block is None and wait:
                self._received.put(None)  # it stays the end
            return block

    def deliver(self, block: Block, outcomes: Sequence[Any]) -> None:
        """Brings the outcomes of a block, packed; what is lost with rank 0 shows in `take`."""
        with contextlib.suppress(*BROKEN):
            self._say(done=block.number, outcomes=list(outcomes))

    def _say(self, **message: Any) -> None:
        with self._sending:
            send(self._connection, **message)

    def _listen(self) -> None:
        """Receives blocks until the end, and says meanwhile that this rank is alive."""
        heard = said = time.monotonic()
        try:
            while not self._ended:
                if self._connection.poll(min(BEAT, self._patience / 4)):
                    message = receive(self._connection)
                    heard = time.monotonic()
                    if "end" in message:
                        break
                    if "block" in message:
                        items = [unpacked_item(item) for item in message["items"]]
                        self._received.put(Block(message["block"], message["first"], items))
                if time.monotonic() - heard > self._patience:
                    raise OSError(f"silent for {self._patience:.0f} s")
                if time.monotonic() - said > min(BEAT, self._patience / 4):
                    self._say(alive=True)
                    said = time.monotonic()
        except BROKEN as error:
            self._lost = str(error) or "it closed the connection"
        self._received.put(None)


def _found(rank: Rank, patience: float) -> Connection:
    """A connection to rank 0, which may still be loading its model."""
    end, reason = time.monotonic() + JOINING, "no address is known"
    while True:
        for address in rank.addresses:
            try:
                opened = socket.create_connection(address, timeout=5)
            except OSError as error:
                reason = f"{shown(address[0])}:{address[1]}: {error.strerror or error}"
                continue
            connection = connection_of(opened, patience)
            with contextlib.suppress(*BROKEN):
                if connection.poll(LOADING):  # it speaks first
                    return connection
            raise Lost(f"rank 0 has ended; {AGAIN}")
        if time.monotonic() > end:
            raise UserError(f"rank 0 does not answer ({reason}); check that it runs and is allowed")
        time.sleep(0.2)
