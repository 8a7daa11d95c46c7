"""The server's socket; how many connections there may be on it, and how long one may be silent.

More requests than the queue has room for are refused by the application (429). But every connection
takes a file descriptor before anything is asked on it, and without descriptors the server would not
even accept those that it could serve.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mlx_t5.cli.arguments import INTERRUPTED
from mlx_t5.errors import UserError
from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.guard import Guard, refuse

# Far above what --max-batch and --max-queue let in, so that a user has nothing to choose; and below
# the descriptors that a process gets (1024 on Linux, 256 on macOS), as the rest needs some too.
MAX_CONNECTIONS = 512
OTHER_DESCRIPTORS = 64  # files and sockets besides connections
HEAD_SECONDS = 30  # in which a request has to begin
REFUSAL_SECONDS = 5  # that one too many stays open, to be told
LAST_SECONDS = 5  # that clients have to read that their requests were given up


def most_connections() -> int:
    """How many connections this process can have."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors - OTHER_DESCRIPTORS))


async def too_many(scope: dict, receive: Callable, send: Callable) -> None:
    """The application of connections above the limit: answers 503."""
    message = "too many connections; try again later"
    await refuse(ApiError(503, message, headers={"Connection": "close"}), send)


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type,misc]  # h11 or httptools
    """uvicorn's protocol with a limit on connections.

    Attributes:
        limit: how many there may be at a time.
    """

    limit = most_connections()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """As in asyncio."""
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            self.app = too_many
            self._timer = self.loop.call_later(REFUSAL_SECONDS, transport.close)
        else:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """As in asyncio."""
        self._timer.cancel()  # or the loop would keep this object until then
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:  # no request has come
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a request for a websocket is answered over HTTP, as is allowed.

        uvicorn would advise to install a library that is of no use here.
        """


def listener(host: str, port: int) -> socket.socket:
    """A socket bound to an address, so that one in use is known before models are loaded.

    Raises:
        UserError: there is no such address, or it cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: {error.strerror}; give an address") from None
    family, kind, protocol, _, address = found[0]
    # Unless the protocol is named, asyncio leaves TCP_NODELAY off, and answers take 40 ms more.
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        raise UserError(message) from None
    return bound


def serve(
    application: Guard,
    bound: socket.socket,
    shutdown_seconds: int,
    give_up: Callable[[], None],
) -> None:
    """Answers requests until SIGTERM or Ctrl-C; a second Ctrl-C ends the process at once.

    Args:
        application: answers them.
        bound: the socket, which listens already.
        shutdown_seconds: in which what runs at the end has to finish.
        give_up: what is left then is refused.
    """

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            late = asyncio.get_running_loop().call_later(shutdown_seconds, give_up)
            await super().shutdown(sockets)
            late.cancel()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                os._exit(INTERRUPTED)  # the second Ctrl-C
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        application,
        log_config=None,
        log_level="warning",
        access_log=False,  # it would show what comes after the question mark of an address
        server_header=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=shutdown_seconds + LAST_SECONDS,
    )
    # uvicorn finishes what runs and then raises the signal again, which would end the process.
    signal.signal(signal.SIGTERM, lambda *_: None)
    Server(config).run(sockets=[bound])
