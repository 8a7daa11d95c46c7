"""The prompts that are measured: held-out ones of the bundled pair, or those of a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.cli import input
from mlx_t5.cli.models import BUNDLED
from mlx_t5.errors import UserError

HELD_OUT = BUNDLED / "heldout.jsonl"  # 1,000 of each task, in turn
MIXED = "mixed"  # both tasks, in turn
TASKS = ("translate", "fix", MIXED)


@dataclass(frozen=True)
class Workload:
    """Prompts with what is known about them.

    Attributes:
        name: the task, or the file's name.
        prompts: the texts.
        references: the right answers; None if they are not known.
        tasks: which task each of them is from, or the file's name.
    """

    name: str
    prompts: list[str]
    references: list[str] | None
    tasks: list[str]

    def positions(self, task: str) -> list[int]:
        """The places of the prompts of one task."""
        return [place for place, own in enumerate(self.tasks) if own == task]


def held_out(task: str, count: int) -> Workload:
    """The first prompts of a task that the bundled pair has not seen in training.

    Args:
        task: one of `TASKS`.
        count: how many.

    Raises:
        UserError: there are not so many.
    """
    records = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    known = [record for record in records if task in (MIXED, record["task"])]
    if count > len(known):
        raise UserError(f"there are {len(known)} held-out prompts of {task}, not {count}")
    columns = ([record[key] for record in known[:count]] for key in ("prompt", "target", "task"))
    return Workload(task, *columns)


def from_file(path: str, count: int) -> Workload:
    """The first prompts of a file, as main.py reads it, and as many as there are at most.

    In a .jsonl an object may have a "target" beside its "prompt"; it counts if all have one.

    Raises:
        UserError: the file cannot be used.
    """
    prompts: list[str] = []
    for line in itertools.islice(input.Lines(path), count):
        if isinstance(line, UserError):
            raise line
        prompts.append(line)
    references = None
    if path.endswith(".jsonl"):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")[: len(prompts)]
        given = [json.loads(line).get("target") for line in lines]
        references = given if all(isinstance(text, str) for text in given) else None
    name = Path(path).name
    return Workload(name, prompts, references, [name] * len(prompts))


def chosen(task: str | None, file: str | None, count: int) -> Workload:
    """The prompts that the options ask for: those of a file, or the held-out ones of a task."""
    return from_file(file, count) if file else held_out(task or MIXED, count)


def cut(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Consecutive items in turns of this size; the last may be smaller."""
    return [list(items[first : first + size]) for first in range(0, len(items), size)]
