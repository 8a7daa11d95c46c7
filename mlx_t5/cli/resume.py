"""Finds the complete lines of an interrupted output, which `--resume` keeps.

Lines of text are kept whatever wrote them. JSON lines must have the prompts of the input.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_t5.errors import UserError

OTHERWISE = "name another --output-file, or leave --resume out to start again"


class ResumePoint(NamedTuple):
    """The part of an output that is kept: its number of prompts, and its size in bytes."""

    prompts: int = 0
    size: int = 0


@dataclass(frozen=True)
class Form:
    """The format of an output's lines."""

    texts: int = 1  # lines per prompt
    result: str | None = None  # the JSON field with the result; None if the lines are texts


def find_resume_point(
    output_file: str, items: Iterator[Any], form: Form, count: int | None = None
) -> ResumePoint:
    """The finished part of an output; advances `items` past the finished prompts.

    Args:
        output_file: the output of an earlier run; it may not exist.
        items: the input's items; each is a text, a pair, or the `UserError` of an unusable line.
        form: the format of the output's lines.
        count: number of items, if it is known.

    Raises:
        UserError: the output has results of other prompts, or of more prompts than the input.
    """
    prompts = size = 0
    try:
        if not stat.S_ISREG(os.stat(output_file).st_mode):  # a pipe or /dev/full never ends
            raise UserError(f"--resume needs a regular file, which {output_file} is not")
        with open(output_file, "rb") as file:
            while True:
                lines = [file.readline() for _ in range(form.texts)]
                complete = lines[-1].endswith(b"\n")
                item = next(items, None) if complete else None
                if item is None and (complete or (prompts == count and file.tell() > size)):
                    more = f"{output_file} has results of more prompts than the input"
                    raise UserError(f"{more}, which has {prompts}; {OTHERWISE}")
                if not complete:
                    return ResumePoint(prompts, size)
                for i, line in enumerate(lines, 1):
                    _check(line, item, form, f"{output_file} line {prompts * form.texts + i}")
                prompts, size = prompts + 1, file.tell()
    except FileNotFoundError:
        return ResumePoint()
    except OSError as error:
        raise UserError(f"cannot read {output_file}: {error.strerror}") from None


def _check(line: bytes, item: Any, form: Form, where: str) -> None:
    """Refuses a JSON line of another prompt."""
    if form.result is None:
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or form.result not in record:
        raise UserError(f"{where} is not an object with {form.result!r}; {OTHERWISE}")
    names = ("prompt", "target") if form.result == "logprob" else ("prompt",)
    for name, text in zip(names, item if isinstance(item, tuple) else (item,), strict=False):
        if record.get(name) != ("" if isinstance(text, UserError) else text):
            raise UserError(f"{where} has another {name} than the input; {OTHERWISE}")
