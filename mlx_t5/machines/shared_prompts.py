"""Sends the prompts that rank 0 reads to all ranks, which decode together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.network.ranks import Ranks

AT_ONCE = 64  # maximum number of prompts shared at a time, if they are ready


class SharedPrompts:
    """An iterator that yields the items of rank 0's iterator on every rank.

    All ranks must call the same methods in the same order.
    """

    def __init__(self, prompts: Any, ranks: Ranks) -> None:
        """Prepares to share prompts.

        Args:
            prompts: on rank 0 a `cli.input.Lines`, or an iterator with the same `ready`, `count`
                and types of items; None on the other ranks.
            ranks: the ranks that decode the prompts.
        """
        self._prompts, self._ranks = prompts, ranks
        self.count: int | None = prompts.count if prompts else None
        self._here: deque[Any] = deque()
        self._ended, self._error = False, None

    def ready(self) -> bool:
        """Returns whether the next prompt, or the end, can be read without waiting."""
        if not self._here and not self._ended:
            self._share(wait=False)
        return bool(self._here) or self._ended

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._here:
            if self._error is not None:
                raise UserError(self._error)
            if self._ended:
                raise StopIteration
            self._share(wait=True)
        return self._here.popleft()

    def _share(self, wait: bool) -> None:
        """Sends prompts from rank 0 to all ranks; with `wait`, waits for at least one prompt."""
        message: list[Any] = [[], None, False]
        if self._ranks.rank == 0:
            message = self._drawn(wait)
        items, self._error, self._ended = self._ranks.shared(message)
        self._here.extend(map(_unpacked, items))

    def _drawn(self, wait: bool) -> list[Any]:
        items: list[Any] = []
        try:
            while len(items) < AT_ONCE and ((wait and not items) or self._prompts.ready()):
                items.append(_packed(next(self._prompts)))
        except StopIteration:
            return [items, None, True]
        except UserError as error:  # the rest of the input cannot be read
            return [items, str(error), True]
        return [items, None, False]


def _packed(item: Any) -> Any:
    return {"error": str(item)} if isinstance(item, Exception) else item


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return UserError(value["error"])
    return tuple(value) if isinstance(value, list) else value
