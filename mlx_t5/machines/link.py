"""Messages between rank 0 and the others, beside the collectives of `mx.distributed`.

Rank 0 tells what is to be computed next, the others tell when they fail. A collective whose peer is
gone may wait for ever, and one that waits spins a core; here waiting costs nothing, and whoever has
not been heard of for `SILENCE` seconds is lost. A connection that is closed tells it at once.

A frame is a length in 4 big-endian bytes and as many bytes of JSON; an empty one is a heartbeat.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

BEAT = 2.0  # seconds between heartbeats
SILENCE = 30.0  # seconds after which a peer that says nothing is lost
JOINING = 60.0  # seconds for all ranks to connect
TOKEN = 16  # bytes that a connection begins with; rank 0 gives them out through the group
_LENGTH = 4


class Connection:
    """A socket to a peer, read by a thread of its own."""

    def __init__(
        self,
        peer: socket.socket,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        silence: float = SILENCE,
    ) -> None:
        """Begins to read.

        Args:
            peer: connected.
            on_message: told every message, in the thread that reads.
            on_lost: told that the peer is gone, or has said nothing for too long.
            silence: seconds that are too long.
        """
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._writing, self._reading, self._lock = peer.dup(), peer, threading.Lock()
        self._writing.settimeout(silence)
        self._reading.settimeout(BEAT)
        self._on_message, self._on_lost, self._silence = on_message, on_lost, silence
        threading.Thread(target=self._read, name="peer", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends a message. A peer that is gone is told by `on_lost` alone."""
        self._send(json.dumps(message, separators=(",", ":")).encode())

    def _send(self, body: bytes) -> None:
        try:
            with self._lock:
                self._writing.sendall(len(body).to_bytes(_LENGTH, "big") + body)
        except OSError:
            pass  # the thread that reads finds out

    def _read(self) -> None:
        buffer, heard = b"", time.monotonic()
        beaten = heard
        while True:
            try:
                data = self._reading.recv(1 << 16)
                if not data:
                    break
                buffer, heard = self._messages(buffer + data), time.monotonic()
            except TimeoutError:
                pass
            except OSError:
                break
            now = time.monotonic()
            if now - heard > self._silence:
                break
            if now - beaten >= BEAT:
                self._send(b"")
                beaten = now
        self._on_lost()

    def _messages(self, data: bytes) -> bytes:
        """Hands on the whole messages that data begins with, and returns the rest."""
        while len(data) >= _LENGTH:
            end = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
            if len(data) < end:
                break
            if end > _LENGTH:
                self._on_message(json.loads(data[_LENGTH:end]))
            data = data[end:]
        return data


def accept(listener: socket.socket, token: bytes, size: int) -> dict[int, socket.socket]:
    """Waits for the other ranks; whoever does not know the token is turned away.

    Returns:
        A socket for each rank from 1 on.

    Raises:
        TimeoutError: some have not come in time.
    """
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + JOINING
    while len(peers) < size - 1:
        listener.settimeout(max(end - time.monotonic(), 0.01))
        peer, _ = listener.accept()
        peer.settimeout(BEAT)
        try:
            hello = _exactly(peer, TOKEN + 1)
        except OSError:
            hello = b""
        if hello[:TOKEN] == token and 0 < hello[-1] < size and hello[-1] not in peers:
            peers[hello[-1]] = peer
        else:
            peer.close()
    return peers


def connect(address: tuple[str, int], token: bytes, rank: int) -> socket.socket:
    """Connects to rank 0."""
    peer = socket.create_connection(address, timeout=JOINING)
    peer.sendall(token + bytes([rank]))
    return peer


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data
