"""The prompts that are measured: held-out ones of the bundled pair, or those of a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import console
from backend import UserError
from demo import corpus

SHARES = {"translate": 1.0, "fix": 0.0}  # of translations in the stream of examples
MIXED = "mixed"  # both, shuffled
TASKS = (*SHARES, MIXED)


@dataclass(frozen=True)
class Workload:
    """Prompts with what is known about them.

    Attributes:
        name: of the prompt set.
        prompts: the texts.
        references: the right answers; None if they are not known.
        sets: which prompt set each of them is from.
    """

    name: str
    prompts: list[str]
    references: list[str] | None
    sets: list[str]

    def of(self, name: str) -> list[int]:
        """The places of the prompts that come from one set."""
        return [place for place, own in enumerate(self.sets) if own == name]


def held_out(task: str, count: int, seed: str) -> Workload:
    """Prompts that the bundled pair has not seen in training.

    Args:
        task: "translate", "fix", or "mixed" for half of each, shuffled.
        count: how many.
        seed: of the sample.
    """
    if task == MIXED:
        parts = held_out("translate", count - count // 2, seed), held_out("fix", count // 2, seed)
        columns = [
            [item for part in parts for item in getattr(part, name)]
            for name in ("prompts", "references", "sets")
        ]
        places = random.Random(f"mixed {seed}").sample(range(count), count)
        return Workload(MIXED, *([column[place] for place in places] for column in columns))
    stream = corpus.examples(seed, held_out=True, translated=SHARES[task])
    examples = list(itertools.islice(stream, count))
    prompts, references = [e.source for e in examples], [e.target for e in examples]
    return Workload(task, prompts, references, [task] * count)


def from_file(path: str, count: int) -> Workload:
    """The first prompts of a file, as main.py reads it, and as many as there are at most.

    In a .jsonl an object may have a "reference" beside its "prompt"; it counts if all have one.

    Raises:
        UserError: the file cannot be used.
    """
    prompts: list[str] = []
    try:
        for line in itertools.islice(console.Lines(path), count):
            if isinstance(line, console.InputError):
                raise line
            prompts.append(line)
    except console.InputError as error:
        raise UserError(str(error)) from None
    references = None
    if path.endswith(".jsonl"):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")[: len(prompts)]
        given = [json.loads(line).get("reference") for line in lines]
        references = given if all(isinstance(text, str) for text in given) else None
    name = Path(path).name
    return Workload(name, prompts, references, [name] * len(prompts))


def chosen(task: str, file: str | None, count: int, seed: str) -> Workload:
    """The prompts that the options ask for."""
    return from_file(file, count) if file else held_out(task, count, seed)


def cut(places: int, size: int) -> list[range]:
    """Consecutive places in turns of this size; the last may be smaller."""
    return [range(first, min(first + size, places)) for first in range(0, places, size)]


def texts(workload: Workload, places: Sequence[int]) -> list[str]:
    """The prompts at these places."""
    return [workload.prompts[place] for place in places]
