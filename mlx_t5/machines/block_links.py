"""How ranks share a file: rank 0 listens, the others come, take blocks and bring them back."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_t5.errors import UserError, shown
from mlx_t5.machines import link
from mlx_t5.machines.blocks import HELD, Block, Blocks
from mlx_t5.machines.launched import KEY, Address, Rank
from mlx_t5.machines.link import Connection, Listener
from mlx_t5.machines.messages import Codec, difference, packed_item, unpacked_item

LOADING = 1800.0  # seconds that rank 0 may take to load its model after it has begun to listen
AGAIN = "start again with --resume to go on where the output ends"


class Lost(UserError):
    """Rank 0 is gone."""


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
        silence: float = link.SILENCE,
    ) -> None:
        """Listens, so that the others may come while the model is still being loaded.

        Args:
            rank: 0, with the addresses to listen at and the key.
            tell: shows a line: of ranks that are lost, and of those that come.
            verbose: whether the latter are to be shown.
            silence: seconds after which a rank that says nothing is lost.

        Raises:
            UserError: an address is taken or not this machine's.
        """
        self._rank, self._tell, self._verbose = rank, tell, verbose
        self._began, self._ended = time.monotonic(), False
        self.seen: set[int] = set()
        self._names = itertools.count()
        self._listener = Listener([_listening(address) for address in rank.addresses], silence)

    def share(self, blocks: Blocks, job: Mapping[str, str], codec: Codec) -> None:
        """Begins to give blocks to the ranks that have the same job."""
        self._listener.accept(self._rank.key, lambda peer: self._serve(peer, blocks, job, codec))

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Lets the other ranks go; those that have not come yet are waited for, if all is well."""
        while kind is None and len(self.seen) < self._rank.size - 1:
            if not self._rank.addresses or time.monotonic() - self._began > link.JOINING:
                break
            time.sleep(link.POLL)
        self._ended = True
        self._listener.close()

    def _serve(
        self, peer: Connection, blocks: Blocks, job: Mapping[str, str], codec: Codec
    ) -> None:
        """Serves one rank until it or the job ends."""
        with peer:
            hello = peer.receive(link.PROVING)
            number = hello["rank"]
            if type(number) is not int or not 0 < number < 1 << 16:
                return
            if other := difference(job, hello.get("job")):
                peer.send({"refused": other})
                return
            name = f"{number}.{next(self._names)}"  # a rank may come again
            peer.send({"welcome": True})
            self.seen.add(number)
            if self._verbose:
                self._tell(f"rank {number} joins")
            try:
                self._give(peer, name, blocks, codec)
            except Exception as error:  # whatever it says, the others do its prompts
                reason = shown(str(error) or type(error).__name__)
                if not self._ended:
                    self._tell(f"rank {number} is lost ({reason}); the others do its prompts")
            finally:
                blocks.lose(name)

    def _give(self, peer: Connection, name: str, blocks: Blocks, codec: Codec) -> None:
        """Gives blocks and takes outcomes, until the end or until the rank leaves."""
        while not self._ended:
            while blocks.held(name) < HELD and (block := blocks.take(name)):
                items = [packed_item(item) for item in block.items]
                peer.send({"block": block.number, "first": block.first, "items": items})
            match peer.receive(link.POLL):
                case None:
                    pass
                case {"done": int(number), "outcomes": list(values)}:
                    blocks.deliver(name, number, [codec.unpacked(value) for value in values])
                case {"leaves": True}:
                    return
                case _:
                    raise ValueError("it says what no rank says")
        peer.send({"end": True})


def _listening(address: Address) -> socket.socket:
    try:
        return link.listening(address)
    except OSError as error:
        where = f"{shown(address[0])}:{address[1]}"
        reason = error.strerror or str(error)
        cure = "end the other job, or choose another port with mlx.launch --starting-port"
        raise UserError(f"rank 0 cannot listen at {where} ({reason}); {cure}") from None


class BlockClient:
    """Another rank's end. A context manager."""

    def __init__(self, rank: Rank, job: Mapping[str, str], silence: float = link.SILENCE) -> None:
        """Finds rank 0.

        Args:
            rank: this one.
            job: what both have to agree about.
            silence: seconds after which rank 0 is lost if it says nothing.

        Raises:
            UserError: rank 0 cannot be found, or has another job or another key.
        """
        self._reason, self._ended = "", False
        self._received: queue.Queue[Block | None] = queue.Queue()
        self._peer = Connection(_found(rank), silence)
        try:
            self._peer.prove(rank.key, listens=False, first=LOADING)
            self._peer.send({"rank": rank.number, "job": dict(job)})
            reply = self._peer.receive()
        except link.AuthenticationError:
            raise UserError(f"rank 0 has another {KEY}; give all ranks the same") from None
        except link.BROKEN:
            raise Lost(f"rank 0 has ended; {AGAIN}") from None
        match reply:
            case {"refused": other}:
                raise UserError(
                    f"rank {rank.number} has another {shown(other)} than rank 0; start all ranks "
                    "with the same options, models and versions"
                )
        self._peer.listen(self._told, self._lost)

    def __enter__(self) -> BlockClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended = True
        self._peer.send({"leaves": True})

    def take(self, wait: bool) -> Block | None:
        """The next block; None at the end, or if there is none and it is not to be waited for.

        Raises:
            Lost: rank 0 is gone.
        """
        while not self._reason:
            with contextlib.suppress(queue.Empty):
                # Short waits, as a Ctrl-C that comes just before one begins does not end it.
                block = self._received.get(wait, timeout=0.5)
                if block is None:
                    self._received.put(None)  # it stays the end
                return block
            if not wait:
                return None
        raise Lost(f"rank 0 is lost ({self._reason}); {AGAIN}")

    def deliver(self, block: Block, outcomes: Sequence[Any]) -> None:
        """Brings the outcomes of a block, packed; that rank 0 is lost shows in `take`."""
        self._peer.send({"done": block.number, "outcomes": list(outcomes)})

    def _told(self, message: Any) -> None:
        match message:
            case {"block": int(number), "first": int(first), "items": list(values)}:
                self._received.put(Block(number, first, [unpacked_item(value) for value in values]))
            case {"end": True}:
                self._ended = True
                self._received.put(None)
            case _:
                raise ValueError("it says what rank 0 does not say")

    def _lost(self, reason: str) -> None:
        if not self._ended:
            self._reason = shown(reason)


def _found(rank: Rank) -> socket.socket:
    """Connects to rank 0, which may still be loading its model."""
    end, reason = time.monotonic() + link.JOINING, "no address is known"
    while True:
        for address in rank.addresses:
            try:
                return socket.create_connection(address, timeout=5)
            except OSError as error:
                reason = f"{shown(address[0])}:{address[1]}: {error.strerror or error}"
        if time.monotonic() > end:
            raise UserError(f"rank 0 does not answer ({reason}); check that it runs and is allowed")
        time.sleep(0.2)
