"""Connections to the server: how many there may be, and how long one may say nothing.

More requests than the queue has room for are refused by the application (429). But every connection
takes a file descriptor before anything is asked on it, and without descriptors the server would not
even accept those that it could serve.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from mlx_t5.serving.errors import ApiError
from mlx_t5.serving.guard import refuse

# Far above what --max-batch and --max-queue let in, so that a user has nothing to choose; and below
# the descriptors that a process gets (1024 on Linux, 256 on macOS), as the rest needs some too.
MAX_CONNECTIONS = 512
OTHER_DESCRIPTORS = 64  # files and sockets besides connections
HEAD_SECONDS = 30  # in which a request has to begin
REFUSAL_SECONDS = 5  # that one too many stays open, to be told


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
    headers = {"Retry-After": "5", "Connection": "close"}
    await refuse(ApiError(503, message, headers=headers), send)


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
