"""What distill.py and finetune.py share: options, checks of the output, and resuming."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_t5.cli.arguments import INTERRUPTED, Options, add_number, at_least, run, within
from mlx_t5.errors import UserError
from mlx_t5.ranges import Range

LARGEST_SEED = 2**53 - 1  # the seeds derived for single prompts are larger


def resumable(
    program: str,
    argv: Sequence[str] | None,
    read: Callable[[Sequence[str]], Options],
    prepare: Callable[[Options], Any],
    rest: str,
) -> int:
    """Runs a command line that trains; after Ctrl-C, prints how to resume.

    Args:
        program: the file name of the program.
        argv: the arguments; None stands for the process's own arguments.
        read: parses and checks the arguments, among them --output and --resume.
        prepare: returns an object whose `run` does the work and returns the exit status.
        rest: a name for the last lines that the program prints, such as "its verdict". If the
            output is complete when Ctrl-C comes, the message says how to get these lines.

    Returns:
        The exit status.
    """
    argv = sys.argv[1:] if argv is None else list(argv)

    def work() -> int:
        args: Any = read(argv)
        try:
            status: int = prepare(args).run()
            return status
        except KeyboardInterrupt:
            again = shlex.join(["python", program, *argv, *["--resume"][args.resume :]])
            hint = "nothing was written"
            if Path(args.output).expanduser().exists():
                hint = f"{args.output} is complete; for {rest} remove it and go on with: {again}"
            elif work_folder(args.output).exists():
                hint = f"go on with: {again}"
            say(f"interrupted; {hint}")
            return INTERRUPTED

    return run(work, interrupted="interrupted; nothing was written")


def say(line: str) -> None:
    """Prints a line on standard error, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def add_course(group: argparse._ArgumentGroup, seeded: str) -> None:
    """Adds the options for evaluation, saving, seed and resuming; `seeded` is --seed's help."""
    number = partial(add_number, group)
    number("--steps-per-eval", at_least(1), 100, "steps between evaluations on held-out prompts")
    number("--save-every", at_least(1), 100, "steps between saved states")
    seeds = Range(int, 0, LARGEST_SEED, f"a whole number from 0 to {LARGEST_SEED}")
    number("--seed", within(seeds), 0, seeded)
    group.add_argument("--resume", action="store_true", help="resume where an earlier run stopped")


def check_output(
    output: str, resume: bool, is_output: Callable[[str], bool], config: str, what: str
) -> None:
    """Refuses an output folder that exists or cannot be made.

    If the folder is the output of an earlier run, the error says that the user may remove it. Such
    a folder has the file `config`, and `is_output` accepts the names of all its files.

    Args:
        output: the path that the user gives.
        resume: whether the user asks to resume an earlier run.
        is_output: a function that takes a file's name and returns whether an earlier run may have
            written the file.
        config: name of a file that every complete output folder has.
        what: name of the folder's content, for messages.

    Raises:
        UserError: `output` is empty, or the folder exists or cannot be made.
    """
    from mlx_t5.checkpoints.writing import check_output_folder
    from mlx_t5.disk import absolute, is_macos_file

    if not output:
        raise UserError("--output is empty; name a folder")
    path = absolute(output)
    if os.path.lexists(path):
        is_complete = (path / config).exists() and all(
            is_output(n) or is_macos_file(n) for n in os.listdir(path)
        )
        if is_complete and resume:
            raise UserError(
                f"{path} exists: the {what} is complete. Use it, or remove it to have it made and "
                "measured again"
            )
        raise UserError(f"{path} exists; choose another --output" + " or remove it" * is_complete)
    above = next(folder for folder in path.parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(f"nothing can be written into {above}; choose another --output")
    check_output_folder(path, overwrite=False, is_output=is_output)


def work_folder(output: str) -> Path:
    """Returns the path of the folder beside the output that holds the state for --resume."""
    path = Path(output).expanduser()
    return path.with_name(f"{path.name}-work")
