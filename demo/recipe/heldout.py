"""Writes demo/heldout.jsonl, the prompts by which the pair is measured: 1,000 of each task.

    python -m demo.recipe.heldout

One object a line with the task, the prompt and the target, its one right answer; the tasks take
turns. No English sentence of it was in the training text (corpus.py keeps both sides apart).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from demo import corpus

FILE = Path(__file__).resolve().parents[1] / "heldout.jsonl"
COUNT = 1000  # pairs of each task
SHARES = {"translate": 1.0, "fix": 0.0}  # task → share of translations in the stream of examples


def lines(count: int = COUNT) -> Iterator[str]:
    """The lines of the file: `count` pairs of each task, no two prompts alike, tasks in turn."""
    for examples in zip(*(distinct(task, count) for task in SHARES), strict=True):
        for example in examples:
            record = {"task": example.task, "prompt": example.source, "target": example.target}
            yield json.dumps(record, ensure_ascii=False) + "\n"


def distinct(task: str, count: int) -> list[corpus.Example]:
    """The first held-out examples of a task whose prompts differ."""
    found: dict[str, corpus.Example] = {}
    stream = corpus.examples(f"heldout {task}", held_out=True, translated=SHARES[task])
    while len(found) < count:
        example = next(stream)
        found.setdefault(example.source, example)
    return list(found.values())


if __name__ == "__main__":
    FILE.write_text("".join(lines()), encoding="utf-8")
