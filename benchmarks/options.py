"""Options that several subcommands have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workload import TASKS
from mlx_t5.cli.arguments import NUM_DRAFT, add_number, add_setting, at_least, within
from mlx_t5.cli.models import BUNDLED

REGULAR = "regular"  # decoding by the target alone; below, what proposes
DRAFT, LOOKUP, BOTH = WAYS = ("draft", "lookup", "draft+lookup")
num_draft = within(NUM_DRAFT)  # an argparse type: a number of proposals, or auto


def add_num_draft(
    parser: argparse.ArgumentParser,
    default: list[int | str],
    what: str = "numbers, or auto",
    kind: Callable[[str], int | str] = num_draft,
) -> None:
    """How many proposals, one setting each; `kind` is an argparse type."""
    add_number(parser, "--num-draft", type=kind, default=default, help=what)


def add_models(parser: argparse.ArgumentParser, dtype: bool = True) -> None:
    """Which models; `dtype` is whether the type they compute in can be chosen."""
    add = parser.add_argument
    add("--model", default=str(BUNDLED / "target"), metavar="NAME", help="the target")
    add("--draft-model", default=str(BUNDLED / "draft"), metavar="NAME", help="the draft")
    if dtype:
        add(
            "--dtype",
            choices=("bfloat16", "float16", "float32"),
            help="compute in this type (default: the folder's; float32 without a GPU)",
        )


def header_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the header says about models and prompts, with paths as short as can be."""
    here = os.path.join(os.getcwd(), "")
    names = args.model.removeprefix(here), args.draft_model.removeprefix(here)
    tasks = " and ".join([args.task] if isinstance(args.task, str) else dict.fromkeys(args.task))
    prompts = f"{args.count} of {args.prompts or tasks}"
    facts = {"target": names[0], "draft": names[1], "prompts": prompts}
    return facts | ({"repeats": args.repeats} if "repeats" in args else {})


def add_prompts(parser: argparse.ArgumentParser, count: int, task: str | list[str]) -> None:
    """Which prompts; `task` is the default, a list where several tasks may be named."""
    several: dict[str, Any] = {"nargs": "+"} if isinstance(task, list) else {}
    shown = " ".join(task) if several else task
    add = parser.add_argument
    add(
        "--task",
        choices=TASKS,
        default=task,
        help=f"held-out prompts of the bundled pair (default: {shown})",
        **several,
    )
    add(
        "--prompts",
        metavar="FILE",
        help="prompts from this file instead: one a line, or .jsonl with a prompt and perhaps a "
        "target in each object",
    )
    add_number(parser, "--count", type=at_least(2), default=count, help="prompts of each task")
    add_setting(parser, "--max-tokens", default=200, help="longest text")


def add_measuring(parser: argparse.ArgumentParser, repeats: int) -> None:
    """How often, and where to."""
    what = "counted runs of each way on each prompt"
    add_number(parser, "--repeats", type=at_least(1), default=repeats, help=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
