"""The parser of every command line, and the options that several share.

Nothing here imports MLX, so `--help` and mistakes need not wait for it.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mlx_t5.ranges import written


class Parser(argparse.ArgumentParser):
    """Reports every mistake as one line that starts with `error:`."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        message = " ".join(message.removeprefix("argument ").split())
        if message.startswith("unrecognized"):
            message += "; see --help"
        self.exit(2, f"error: {message}\n")


def not_installed(error: ImportError, requirements: str = "requirements.txt") -> str:
    """What to tell whoever starts a command without the packages that it needs."""
    reason = str(error).strip().split("\n")[0].rstrip(".:")
    if isinstance(error, ModuleNotFoundError) and error.name:
        reason = f"{error.name.partition('.')[0]} is not installed"
    return f"{reason}; pip install -r {requirements}"


def open_streams() -> None:
    """Makes the standard streams fit for use: no name fails there, and a closed one is empty.

    A closed one must not stay so: the next file opened would take its place, and get what C
    libraries write there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files may be no Unicode; "\\udce9" is what JSON writes for such a byte too.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def number(kind: Callable, fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """An argparse type: a number that fits; `wanted` tells the user what does."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"give {wanted}, not {written(text)}")
        return value

    return parse


def add_models(group: argparse._ArgumentGroup) -> None:
    """Adds the options that name the models."""
    group.add_argument(
        "--model",
        "--model-name",
        metavar="NAME",
        help="the target: a folder, the name of a folder in models/, or a Hub id, which is "
        "converted into models/ once (default: t5-11b with t5-small where models/ has both, "
        "otherwise the bundled pair)",
    )
    group.add_argument(
        "--draft-model",
        "--draft-model-name",
        metavar="NAME",
        help="the draft, named likewise; lookup: copy from the source, without a second model; "
        "NAME+lookup: both; none: regular decoding (default: the one that belongs to the target, "
        "if there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="compute in this type (default: the folder's; float32 where there is no GPU)",
    )


def add_speculation(group: argparse._ArgumentGroup, without: str) -> None:
    """Adds --num-draft and --delta.

    Args:
        group: what to add them to.
        without: how this command line is told to decode without a draft.
    """
    gamma = number(
        lambda text: text if text == "auto" else int(text),
        lambda n: n == "auto" or n >= 1,
        f"a whole number of at least 1 or auto (or {without} for no draft)",
    )
    group.add_argument(
        "--num-draft",
        type=gamma,
        default=5,
        metavar="N",
        help="tokens the draft proposes at a time; auto: as many as pay at the moment "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--delta",
        type=number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        default=0.0,
        metavar="D",
        help="leniency: 0 gives the target's own output, 1 keeps whatever the draft proposes "
        "(default: %(default)s)",
    )
