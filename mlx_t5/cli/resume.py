"""Finds the lines that `--resume` keeps in an output: those of the finished prompts.

An interrupted run leaves the results of the first prompts, and perhaps an incomplete line. JSON
lines are compared with their prompts, so that an output is not resumed with a different input.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from mlx_t5.errors import UserError

OTHERWISE = "name another --output-file, or leave --resume out to start again"


@dataclass(frozen=True)
class ResumePoint:
    """The part of an output that is kept.

    Attributes:
        prompts: number of finished prompts.
        size: number of bytes that their lines take, from the beginning of the file.
        all: whether every prompt of the input is finished.
    """

    prompts: int = 0
    size: int = 0
    all: bool = False


@dataclass(frozen=True)
class Form:
    """The format of an output's lines.

    Attributes:
        texts: number of lines per prompt.
        result: the field with the result in each line's JSON object; None if the lines are texts.
    """

    texts: int = 1
    result: str | None = None


def find_resume_point(
    output_file: str, items: Iterator[Any], form: Form, count: int | None = None
) -> ResumePoint:
    """Returns the finished part of an output; advances `items` past the finished prompts.

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
            raise UserError(f"--resume goes on with a file, which {output_file} is not")
        with open(output_file, "rb") as file:
            while lines := _whole_lines(file, form.texts):
                item = next(items, None)
                if item is None:
                    raise _too_many(output_file, prompts)
                for i, line in enumerate(lines):
                    where = f"{output_file} line {prompts * form.texts + i + 1}"
                    _check(line, item, form, where)
                prompts, size = prompts + 1, size + sum(map(len, lines))
            if prompts == count and file.tell() > size:
                raise _too_many(output_file, prompts)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f"cannot read {output_file}: {error.strerror}") from None
    return ResumePoint(prompts, size, 0 < prompts == count)


def _too_many(output_file: str, prompts: int) -> UserError:
    more = f"{output_file} has results of more prompts than the input"
    return UserError(f"{more}, which has {prompts}; {OTHERWISE}")


def _whole_lines(file: IO[bytes], count: int) -> list[bytes]:
    """Returns the next prompt's `count` lines; an empty list if a line is missing or incomplete."""
    lines = [file.readline() for _ in range(count)]
    return lines if all(line.endswith(b"\n") for line in lines) else []


def _check(line: bytes, item: Any, form: Form, where: str) -> None:
    """Refuses a line whose JSON object belongs to a different item."""
    if form.result is None:
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or form.result not in record:
        raise UserError(f"{where} is no object with {form.result!r}; {OTHERWISE}")
    names = ("prompt", "target") if form.result == "logprob" else ("prompt",)
    for name, text in zip(names, item if isinstance(item, tuple) else (item,), strict=False):
        if record.get(name) != ("" if isinstance(text, UserError) else text):
            raise UserError(f"{where} has another {name} than the input; {OTHERWISE}")
