"""Which of several processes this one is, as `mlx.launch` tells it through the environment.

The variables are those of MLX's backends (https://ml-explore.github.io/mlx, "Distributed
communication", "Distributed without mlx.launch"). Only what they say is taken: nothing here opens
the collectives, which would wait for ever for a rank that is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_t5.errors import UserError, shown

LAUNCH = "mlx.launch -n 2 -- python main.py …"
KEY = "T5_PARALLEL_KEY"  # a secret that the ranks share
Address = tuple[str, int]


@dataclass(frozen=True)
class Rank:
    """One of the processes that share a file.

    Attributes:
        number: 0 reads the input and writes the output.
        size: how many there are.
        addresses: host and port, where rank 0 listens and the others find it.
        key: what they prove to each other that they know.
    """

    number: int
    size: int
    addresses: tuple[Address, ...]
    key: bytes = b""

    @property
    def leads(self) -> bool:
        """Whether it is rank 0."""
        return self.number == 0


def alone(environment: Mapping[str, str]) -> bool:
    """Whether this process is none of several that `mlx.launch` has started.

    Raises:
        UserError: the variables are damaged.
    """
    return "MLX_RANK" not in environment or rank_of(environment).size == 1


def rank_of(environment: Mapping[str, str]) -> Rank:
    """Reads the variables of the ring, jaccl and NCCL.

    Raises:
        UserError: they are missing or damaged.
    """
    if "MLX_RANK" not in environment:
        raise UserError(f"--parallel needs ranks; start it with: {LAUNCH}")
    number = _number("MLX_RANK", environment["MLX_RANK"])
    key = environment.get(KEY, "").encode()
    if environment.get("MLX_JACCL_COORDINATOR"):
        size = len(_read("MLX_IBV_DEVICES", environment.get("MLX_IBV_DEVICES", "")))
        return Rank(number, size, (_address(environment["MLX_JACCL_COORDINATOR"]),), key)
    if environment.get("NCCL_HOST_IP"):
        size = _number("MLX_WORLD_SIZE", environment.get("MLX_WORLD_SIZE", ""))
        port = environment.get("NCCL_PORT", "")
        return Rank(number, size, (_address(f"{environment['NCCL_HOST_IP']}:{port}"),), key)
    hosts = _read("MLX_HOSTFILE", environment.get("MLX_HOSTFILE", ""))
    addresses = tuple(_address(text) for text in (hosts[0] if hosts else []))
    return Rank(number, max(len(hosts), 1), addresses, key)


def _read(name: str, file: str) -> list[list[str]]:
    """A list of lists in a file of JSON; an empty file, as of a single rank, has none."""
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read().strip()
        found = json.loads(text) if text else []
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, list) and each for each in found):
        raise UserError(f"{name} is {shown(file)!r}, which lists no ranks; start with: {LAUNCH}")
    return found


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise UserError(f"{name} is {shown(text)!r}, which is no whole number")
    return int(text)


def _address(text: object) -> Address:
    host, _, port = str(text).rpartition(":")
    if not host:
        raise UserError(f"{shown(str(text))!r} is no address of rank 0; it must be HOST:PORT")
    return host.strip("[]"), _number("the port of rank 0", port)
