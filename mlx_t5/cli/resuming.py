"""What an earlier run of main.py has written: `--resume` keeps the complete lines of its output.

Lines of text are kept whatever wrote them; JSON lines must have the prompts of the input.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_t5.cli.input import Line
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from mlx_t5.cli.generate_options import MainOptions

OTHERWISE = "name another --output-file, or leave --resume out to start again"


@dataclass(frozen=True)
class ResumePoint:
    """The part of an output that is kept: its number of prompts, and its size in bytes."""

    prompts: int = 0
    size: int = 0


def find_resume_point(
    output_file: str,
    lines: Iterator[Line],
    texts: int = 1,
    result: str | None = None,
    count: int | None = None,
) -> ResumePoint:
    """The finished part of an output; advances `lines` past the finished prompts.

    Args:
        output_file: the output of an earlier run; it may not exist.
        lines: the input.
        texts: lines per prompt.
        result: the JSON field with the result; None if the lines are texts.
        count: number of the input's lines, if it is known.

    Raises:
        UserError: the output has results of other prompts, or of more prompts than the input.
    """
    prompts = size = 0
    try:
        if not stat.S_ISREG(os.stat(output_file).st_mode):  # a pipe or /dev/full never ends
            raise UserError(f"--resume needs a regular file, which {output_file} is not")
        with open(output_file, "rb") as file:
            while True:
                results = [file.readline() for _ in range(texts)]
                complete = results[-1].endswith(b"\n")
                line = next(lines, None) if complete else None
                if line is None and (complete or (prompts == count and file.tell() > size)):
                    more = f"{output_file} has results of more prompts than the input"
                    raise UserError(f"{more}, which has {prompts}; {OTHERWISE}")
                if line is None:
                    return ResumePoint(prompts, size)
                if result:
                    for i, written in enumerate(results, 1):
                        where = f"{output_file} line {prompts * texts + i}"
                        _check(written, line, result, where)
                prompts += 1
                size = file.tell()
    except FileNotFoundError:
        return ResumePoint()


def _check(written: bytes, line: Line, result: str, where: str) -> None:
    """Refuses a JSON line without a result, or of another prompt."""
    try:
        record = json.loads(written)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or result not in record:
        raise UserError(f"{where} is not an object with {result!r}; {OTHERWISE}")
    for name, text in (("prompt", line.text), ("target", line.target)):
        if text is not None and record.get(name) != text:
            raise UserError(f"{where} has another {name} than the input; {OTHERWISE}")


def refuse_interrupted(inputs: Sequence[MainOptions]) -> None:
    """Refuses to replace what an interrupted run has written, because it may have taken hours."""
    if inputs[0].resume or inputs[0].overwrite:
        return
    written = [options for options in inputs if os.path.exists(options.output_file or "")]
    found = ""
    if 0 < len(written) < len(inputs):
        found = f"{written[0].output_file} is one of {len(written)} results for {len(inputs)} files"
    for options in written:
        path = options.output_file or ""
        if options.is_output_whole or not os.path.isfile(path):
            continue
        try:
            # Files among several are opened only for this, because so many may not be open.
            count = replace(options).lines.count if options.place else options.lines.count
        except (UserError, OSError):  # that is reported when it is the file's turn
            continue
        with open(path, "rb") as file:
            complete = sum(1 for line in file if line.endswith(b"\n"))
        expected = (count or 0) * options.texts_per_prompt
        if 0 < complete < expected:
            found = f"{path} has {complete} of {expected} lines"
    if found:
        raise UserError(
            f"{found}, from an interrupted run: --resume continues it, --overwrite replaces it"
        )
