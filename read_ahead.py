"""Reading in a thread of its own, so that whoever decodes need not wait for the next prompt."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """An iterator whose items are drawn in a thread, a bounded number of them ahead.

    An exception of the source is raised in the place of the item that it prevented. The thread is
    a daemon: a source that never ends does not keep the process from ending.
    """

    def __init__(self, items: Iterable[Item], ahead: int = 64) -> None:
        """Begins to draw; `ahead` items at most wait to be taken."""
        self._drawn: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(ahead)
        threading.Thread(target=self._draw, args=(items,), daemon=True).start()

    def _draw(self, items: Iterable[Item]) -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                self._drawn.put((item, None))
        except BaseException as error:
            end = error
        self._drawn.put((None, end))

    def ready(self) -> bool:
        """Whether the next item, or the end, can be taken without waiting."""
        return not self._drawn.empty()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item, end = self._next()
        if end is not None:
            self._drawn.put((None, end))  # it stays the end
            raise end
        return item

    def _next(self) -> tuple[Item | None, BaseException | None]:
        while True:  # a Ctrl-C that comes just before a wait begins does not end it: short ones
            with contextlib.suppress(queue.Empty):
                return self._drawn.get(timeout=0.5)
