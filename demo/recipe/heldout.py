"""Writes demo/heldout.jsonl, the prompts by which the pair is measured: 1,000 of each task.

    python -m demo.recipe.heldout

One object a line with the task, the prompt and the target, its one right answer; the tasks take
turns. The training text has none of its English sentences.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from demo.recipe import corpus

FILE = Path(__file__).resolve().parents[1] / "heldout.jsonl"
COUNT = 1000  # pairs of each task


def lines(count: int = COUNT) -> Iterator[str]:
    """The lines of the file: `count` pairs of each task, no two prompts alike, tasks in turn."""
    for examples in zip(*(distinct(task, count) for task in corpus.SHARES), strict=True):
        for example in examples:
            record = {"task": example.task, "prompt": example.source, "target": example.target}
            yield json.dumps(record, ensure_ascii=False) + "\n"


def distinct(task: str, count: int) -> list[corpus.Example]:
    """The first held-out examples of a task whose prompts differ."""
    found: dict[str, corpus.Example] = {}
    for example in corpus.held_out(task, f"heldout {task}"):
        found.setdefault(example.source, example)
        if len(found) == count:
            break
    return list(found.values())


if __name__ == "__main__":
    FILE.write_text("".join(lines()), encoding="utf-8")
