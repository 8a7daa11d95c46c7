"""One file over several ranks: rank r does lines r, r + n, … into a part; rank 0 joins the parts.

A part lies beside the output until the output is whole, so that a run can be resumed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from mlx_t5.errors import UserError
from mlx_t5.network.ranks import Ranks

AT_ONCE = 64  # prompts whose results a rank hands over at a time

Item = TypeVar("Item")


class Part:
    """What one rank does of a file.

    Attributes:
        path: where its results are until all have theirs.
        first: the place in the input of its first prompt.
    """

    def __init__(self, output_file: str, done: int, ranks: Ranks) -> None:
        """Finds this rank's part.

        Args:
            output_file: where all results are to be.
            done: prompts whose results are there.
            ranks: that share the others.

        Raises:
            UserError: the output is no file that can be replaced.
        """
        if os.path.exists(output_file) and not os.path.isfile(output_file):
            raise UserError(f"{output_file} is no file; --parallel data needs one for its results")
        self._output, self._ranks, self._done = os.path.realpath(output_file), ranks, done
        self.first = done + ranks.rank
        name = f"{self._output}.part-{ranks.rank + 1}-of-{ranks.size}"
        self.path = f"{name}-from-{done + 1}" if done else name

    def of(self, items: Iterable[Item]) -> Iterator[Item]:
        """This rank's items of all."""
        return islice(items, self.first, None, self._ranks.size)

    def count(self, total: int) -> int:
        """How many items that are, of so many."""
        return len(range(self.first, total, self._ranks.size))

    def join(self, lines: int, keep: int, write: Callable[[str], Any]) -> None:
        """Hands the results over to rank 0, which writes all of them in the order of the input.

        Args:
            lines: a prompt.
            keep: bytes of the output that stand before them.
            write: opens a file's writer, given its path: a context manager with `write_line`.

        Raises:
            UserError: rank 0 cannot write.
        """
        merged = f"{self._output}.joining"
        path = self.path if os.path.exists(self.path) else os.devnull  # of no prompts
        with open(path, encoding="utf-8", newline="\n") as file:
            if self._ranks.rank:
                for _ in self._rounds(file, lines):
                    pass
            else:
                Path(merged).unlink(missing_ok=True)
                if keep:
                    shutil.copyfile(self._output, merged)
                    os.truncate(merged, keep)
                with write(merged) as output:
                    for line in chain.from_iterable(self._rounds(file, lines)):
                        output.write_line(line)
                if os.path.exists(merged):  # of vectors there is none, if there are errors alone
                    os.replace(merged, self._output)
        self._ranks.gathered(None)  # only now: rank 0 has written
        self.remove()

    def remove(self) -> None:
        """Removes the part."""
        Path(self.path).unlink(missing_ok=True)

    def _rounds(self, file: Iterable[str], lines: int) -> Iterator[list[str]]:
        """The lines of a few prompts of every rank, in the order of the input."""
        own = iter(file)
        while True:
            prompts = [list(islice(own, lines)) for _ in range(AT_ONCE)]
            parts = self._ranks.gathered([[line[:-1] for line in p] for p in prompts if p])
            if not any(parts):
                return
            in_order = chain.from_iterable(zip_longest(*parts, fillvalue=[]))
            yield list(chain.from_iterable(in_order))
