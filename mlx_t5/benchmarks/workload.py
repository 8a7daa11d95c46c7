"""Chooses what is measured: options for models, prompts and repeats, and the prompts themselves.

This module does not import MLX, because some subcommands use MLX only in other processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.cli import input
from mlx_t5.cli.arguments import DTYPES, Option, at_least, setting
from mlx_t5.disk import BUNDLED
from mlx_t5.drafting.named import DRAFTERS
from mlx_t5.errors import UserError

REGULAR = "regular"  # decoding by the target alone
DRAFT = "draft"
PROPOSERS = (DRAFT, *DRAFTERS, *(f"{DRAFT}+{name}" for name in DRAFTERS))
HELD_OUT = BUNDLED / "heldout.jsonl"  # 1,000 of each task, alternating
MIXED = "mixed"  # both tasks, alternating
TASKS = ("translate", "fix", MIXED)
SAMPLING: dict[str, dict[str, float]] = {
    "temp 1": {"temp": 1.0},
    "top-k 50": {"temp": 1.0, "top_k": 50},
    "top-p 0.9": {"temp": 1.0, "top_p": 0.9},
}


@dataclass(frozen=True)
class Workload:
    """Prompts, with their tasks and, if all are known, references."""

    name: str
    prompts: list[str]
    references: list[str] | None
    tasks: list[str]

    def positions(self, task: str) -> list[int]:
        return [i for i, name in enumerate(self.tasks) if name == task]


MODEL = Option(
    "the target",
    str(BUNDLED / "target"),
    metavar="NAME",
    default_text="the bundled one",
    group="models",
)
DRAFT_MODEL = MODEL.but(
    help="the draft; none: measure without one (default: the target's default draft, if any)",
    default=None,
)
MODELS = {
    "model": MODEL,
    "draft_model": DRAFT_MODEL,
    "dtype": Option(
        "compute in this type (default: the folder's; float32 without a GPU)", kind=DTYPES
    ),
}
PROMPTS = Option(
    "use the prompts in this file: one per line, or .jsonl with a prompt and optionally a target "
    "in each object",
    metavar="FILE",
    group="prompts",
)
JSON = Option("write all figures to this file", kind=Path, metavar="FILE", group="measuring")


def prompts(count: int, task: str | tuple[str, ...]) -> dict[str, Option]:
    """Returns options for the prompts.

    Args:
        count: the default number of prompts.
        task: the default task; a tuple if several tasks may be named.
    """
    what, several = "held-out prompts of the bundled pair", isinstance(task, tuple)
    return {
        "task": Option(what, task, TASKS, several=several, group="prompts"),
        "prompts": PROMPTS,
        "count": Option("prompts of each --task", count, at_least(2)),
        "max_tokens": setting("max_tokens", help="maximum length of a text in tokens", default=200),
    }


def measuring(repeats: int) -> dict[str, Option]:
    """Returns --repeats, how often to measure, and --json, the file to write the results to."""
    what = "timed runs of every variant on every prompt"
    return {"repeats": Option(what, repeats, at_least(1), group="measuring"), "json": JSON}


def header_fields(args: argparse.Namespace) -> dict[str, Any]:
    here = os.path.join(os.getcwd(), "")
    draft = args.draft_model or "its default"
    names = args.model.removeprefix(here), draft.removeprefix(here)
    tasks = " and ".join([args.task] if isinstance(args.task, str) else dict.fromkeys(args.task))
    prompts = f"{args.count} of {args.prompts or tasks}"
    models = {"target": names[0], "draft": names[1]}
    return {**models, "prompts": prompts, "repeats": args.repeats}


def workloads(args: argparse.Namespace) -> list[Workload]:
    tasks = [MIXED] if args.prompts else dict.fromkeys(args.task)
    return [chosen(task, args.prompts, args.count) for task in tasks]


def chosen(task: str, file: str | None, count: int) -> Workload:
    return from_file(file, count) if file else held_out(task, count)


def held_out(task: str, count: int) -> Workload:
    """The first held-out prompts of a task, which the bundled pair was not trained on."""
    records = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    known = [record for record in records if task in (MIXED, record["task"])]
    if count > len(known):
        raise UserError(f"there are {len(known)} held-out prompts of {task}, not {count}")
    columns = ([record[key] for record in known[:count]] for key in ("prompt", "target", "task"))
    return Workload(task, *columns)


def from_file(path: str, count: int) -> Workload:
    """The first prompts of a file as --input-file reads it, with "target" as the reference."""
    lines = []
    for line in itertools.islice(input.LineReader(path, optional="target").read(), count):
        if isinstance(line.source, Exception):
            raise line.source
        lines.append(line)
    targets = [line.target for line in lines if line.target is not None]
    references, name = targets if len(targets) == len(lines) else None, Path(path).name
    return Workload(name, [line.text for line in lines], references, [name] * len(lines))


def changed(texts: Sequence[str], percent: float) -> list[str]:
    """Replaces `percent` of the words by random words of the same texts."""
    draw, every = random.Random(0), sorted({word for text in texts for word in text.split()})

    def word_for(word: str) -> str:
        candidates = [other for other in every if other != word]
        return draw.choice(candidates) if candidates and draw.random() * 100 < percent else word

    return [" ".join(map(word_for, text.split())) for text in texts]


def cut(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[first : first + size]) for first in range(0, len(items), size)]
