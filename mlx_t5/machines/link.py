"""Connections between ranks: who may speak, what a message is, and when a peer is lost.

Both ends prove that they know a key (`multiprocessing.connection`, HMAC) before anything else is
read. A frame is a length in 4 big-endian bytes and as many bytes of JSON, of which nothing is ever
unpickled. An empty one is a heartbeat: whoever is silent for `SILENCE` seconds is lost, whatever
has happened to its machine, and a connection that is closed tells so at once. Waiting costs
nothing, unlike in a collective of `mx.distributed`, which may also wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any

SILENCE = 30.0  # seconds after which a peer that says nothing is lost
BEATS = 15  # heartbeats in that time
JOINING = 60.0  # seconds for all ranks to connect
PROVING = 10.0  # seconds for each step of proving the key
STRANGERS = 64  # connections that may be proving it at a time
POLL = 0.1  # seconds between looks at what is not a connection
LARGEST = 1 << 28  # bytes of a message
BROKEN = (OSError, ValueError, AuthenticationError)  # what a connection raises
_LENGTH, _CHUNK = 4, 1 << 16


class Connection:
    """Frames over a connected socket. One thread reads, and any may send."""

    def __init__(self, peer: socket.socket, silence: float = SILENCE) -> None:
        """Takes a socket, after which only this reads, writes and closes it.

        Args:
            peer: connected.
            silence: seconds after which the peer is lost if it says nothing, or takes nothing.
        """
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setblocking(False)
        self._peer, self._silence, self._beat = peer, silence, silence / BEATS
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(peer, select.POLLIN)
        self._writable.register(peer, select.POLLOUT)
        self._sending, self._buffer = threading.Lock(), bytearray()
        self._waited = 0.0  # seconds of waiting in vain; a process that was stopped did not wait
        self._beaten = time.monotonic()

    def prove(self, key: bytes, listens: bool, first: float) -> None:
        """Proves to the peer that this end knows the key, and has it prove the same.

        Args:
            key: both have to know it.
            listens: whether this end has been connected to: it asks first.
            first: seconds until the peer has said something.

        Raises:
            AuthenticationError: the peer has another key.
            OSError, ValueError: it does not answer, or with something else.
        """
        self._until = time.monotonic() + first
        steps = (deliver_challenge, answer_challenge)
        for step in steps if listens else reversed(steps):
            step(self, key)  # type: ignore[arg-type]  # it needs the next two methods only

    def recv_bytes(self, limit: int) -> bytes:
        """A frame of at most so many bytes, while the key is proved."""
        while not (frame := self._frame(limit)):
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it does not answer")
            self._fill(left)
        self._until = time.monotonic() + PROVING
        return frame

    def send_bytes(self, body: bytes) -> None:
        """Sends a frame."""
        with self._sending:
            self._write(len(body).to_bytes(_LENGTH, "big") + body)

    def send(self, message: Any) -> None:
        """Sends a message. That the peer is gone shows in `receive`."""
        with contextlib.suppress(OSError):
            self.send_bytes(json.dumps(message, separators=(",", ":")).encode())

    def receive(self, seconds: float = math.inf) -> Any:
        """The next message; None if there is none in time. Tells the peer that this end is alive.

        Raises:
            OSError: the peer is gone, or silent.
            ValueError: it sends no JSON, or a message that is too long.
        """
        end = time.monotonic() + seconds
        while True:
            self._keep_alive()
            if frame := self._frame(LARGEST):
                return _parsed(frame)
            left = min(self._beat, end - time.monotonic())
            if left <= 0:
                return None
            self._waited = 0 if self._fill(left) else self._waited + left
            if self._waited >= self._silence:
                raise TimeoutError(f"silent for {self._silence:.0f} s")

    def listen(self, told: Callable[[Any], None], lost: Callable[[str], None]) -> None:
        """Begins to read, in a thread of its own.

        Args:
            told: gets every message.
            lost: gets the reason once the peer is gone.
        """

        def read() -> None:
            try:
                while True:
                    told(self.receive())
            except Exception as error:  # whatever a peer says ends its connection alone
                self.close()
                lost(str(error) or type(error).__name__)

        threading.Thread(target=read, name="peer", daemon=True).start()

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)  # ends what another thread waits for
        with self._sending:
            self._peer.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _frame(self, limit: int) -> bytes | None:
        """Takes the next frame that is no heartbeat from what has come; None if it is not whole."""
        while len(self._buffer) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH], "big")
            if end > _LENGTH + limit:
                raise ValueError(f"a message of {end - _LENGTH} bytes")
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[_LENGTH:end])
            del self._buffer[:end]
            if frame:
                return frame
        return None

    def _fill(self, seconds: float) -> bool:
        """Waits for bytes; whether some have come."""
        if not self._readable.poll(1000 * seconds):
            return False
        data = self._peer.recv(_CHUNK)
        if not data:
            raise ConnectionError("it closed the connection")
        self._buffer += data
        return True

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._peer.send(left) :]
            except BlockingIOError:
                if not self._writable.poll(1000 * self._silence):
                    self._peer.shutdown(socket.SHUT_RDWR)  # nothing may follow half a frame
                    raise TimeoutError("it takes nothing") from None

    def _keep_alive(self) -> None:
        """Sends a heartbeat where one is due, unless that would wait: who reads never writes long.

        Two ends that both wait to write would wait for each other.
        """
        now = time.monotonic()
        if now - self._beaten >= self._beat and self._sending.acquire(blocking=False):
            try:
                if self._writable.poll(0):
                    self._write(bytes(_LENGTH))
            finally:
                self._sending.release()
            self._beaten = now


def _parsed(frame: bytes) -> Any:
    try:
        return json.loads(frame)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def listening(address: tuple[str, int]) -> socket.socket:
    """A socket that others can connect to.

    Raises:
        OSError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=128)


class Listener:
    """Takes connections, each in a thread of its own, so that nobody waits for a stranger."""

    def __init__(self, sockets: Sequence[socket.socket], silence: float = SILENCE) -> None:
        """Takes sockets that listen; see `Connection` for `silence`."""
        self._sockets, self._silence, self._closed = sockets, silence, False
        self._threads: list[threading.Thread] = []
        self._strangers = threading.Semaphore(STRANGERS)

    def accept(self, key: bytes, each: Callable[[Connection], None]) -> None:
        """Begins to take connections.

        Args:
            key: what a peer has to prove that it knows.
            each: is given the connection to a peer that has, and keeps it or closes it. An
                exception closes it.
        """
        for sock in self._sockets:
            self._start(self._accept, sock, key, each)

    def close(self) -> None:
        """Takes no more; those who have come may say a last word."""
        self._closed = True
        end = time.monotonic() + 2
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for sock in self._sockets:
            sock.close()

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _accept(self, sock: socket.socket, key: bytes, each: Callable[[Connection], None]) -> None:
        sock.settimeout(POLL)
        while not self._closed:
            if not self._strangers.acquire(timeout=POLL):
                continue
            try:
                peer, _ = sock.accept()
                self._start(self._serve, peer, key, each)
            except OSError as error:
                self._strangers.release()
                if not isinstance(error, TimeoutError):  # too many open files, say
                    time.sleep(POLL)

    def _serve(self, peer: socket.socket, key: bytes, each: Callable[[Connection], None]) -> None:
        try:
            try:
                connection = Connection(peer, self._silence)
                connection.prove(key, listens=True, first=PROVING)
            finally:
                self._strangers.release()
            each(connection)
        except Exception:  # see `Connection.listen`
            peer.close()


def gather(sock: socket.socket, key: bytes, size: int) -> dict[int, Connection]:
    """Waits for the other ranks; whoever is none of them is turned away.

    Returns:
        A connection to each rank from 1 on.

    Raises:
        TimeoutError: some have not come in time.
    """
    arrived: queue.SimpleQueue[tuple[Any, Connection]] = queue.SimpleQueue()
    peers: dict[int, Connection] = {}
    end = time.monotonic() + JOINING
    with contextlib.closing(Listener([sock])) as listener:
        listener.accept(key, lambda peer: arrived.put((peer.receive(PROVING), peer)))
        while len(peers) < size - 1:
            try:
                rank, peer = arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError("some have not come in time") from None
            if type(rank) is int and 0 < rank < size and rank not in peers:
                peers[rank] = peer
            else:
                peer.close()
    while not arrived.empty():
        arrived.get()[1].close()
    return peers


def join(address: tuple[str, int], key: bytes, rank: int) -> Connection:
    """Connects to rank 0, which gathers."""
    peer = Connection(socket.create_connection(address, timeout=JOINING))
    peer.prove(key, listens=False, first=JOINING)  # strangers may be before it
    peer.send(rank)
    return peer
