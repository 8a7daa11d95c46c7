"""Common parts of the command lines that train: options, output, resuming after Ctrl-C."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_t5.cli.arguments import INTERRUPTED, Options, Parser, add_number, at_least, run, within
from mlx_t5.errors import UserError
from mlx_t5.ranges import Range

LARGEST_SEED = 2**53 - 1  # every prompt has its own, a larger one


def resumable(
    program: str,
    argv: Sequence[str] | None,
    read: Callable[[Sequence[str]], Options],
    prepare: Callable[[Options], Any],
    rest: str,
) -> int:
    """Runs a command line that trains; after Ctrl-C says how to resume.

    Args:
        program: its file.
        argv: the arguments; None for the process's own.
        read: parses and checks them, including --output and --resume.
        prepare: returns an object whose `run` does the work and returns the exit status.
        rest: called once the output is complete.

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


def add_course(parser: Parser, seeded: str) -> None:
    """Adds the options for a training's schedule; `seeded` says what the seed decides."""
    number = partial(add_number, parser)
    number("--steps-per-eval", at_least(1), 100, "steps between evaluations on held-out prompts")
    number("--save-every", at_least(1), 100, "steps after which the state is written")
    seeds = Range(int, 0, LARGEST_SEED, f"a whole number from 0 to {LARGEST_SEED}")
    number("--seed", within(seeds), 0, seeded)
    parser.add_argument("--resume", action="store_true", help="resume where an earlier run stopped")


def check_output(
    output: str, resume: bool, ours: Callable[[str], bool], config: str, what: str
) -> None:
    """Refuses an output folder that exists, or that cannot be made.

    Args:
        output: the folder, as given.
        resume: whether an earlier run is to be resumed.
        ours: whether a file of this name can be in such a folder.
        config: a file that a complete folder has.
        what: what the folder holds, for messages.

    Raises:
        UserError: it exists, or cannot be made.
    """
    from mlx_t5.checkpoints.output_folder import check_output_folder
    from mlx_t5.checkpoints.small_files import place
    from mlx_t5.disk import is_macos_file

    if not output:
        raise UserError("--output is empty; name a folder")
    path = place(output)
    if os.path.lexists(path):
        made = (path / config).exists() and all(
            ours(n) or is_macos_file(n) for n in os.listdir(path)
        )
        if made and resume:
            raise UserError(
                f"{path} exists: the {what} is complete. Use it, or remove it to have it made and "
                "measured again"
            )
        raise UserError(f"{path} exists; choose another --output" + " or remove it" * made)
    above = next(folder for folder in path.parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UserError(f"nothing can be written into {above}; choose another --output")
    check_output_folder(path, overwrite=False, ours=ours)


def work_folder(output: str) -> Path:
    """Returns the folder, beside the output, with the state that another run can resume."""
    path = Path(output).expanduser()
    return path.with_name(f"{path.name}-work")
