"""Common parts of the command lines: parser, exit status, error messages and options.

Nothing here imports MLX, so `--help` and error messages do not wait for its import.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mlx_t5.errors import UserError, is_out_of_memory, log, reason
from mlx_t5.settings import SETTINGS, Range, Settings, written

Options = TypeVar("Options")
ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE
NO_MEMORY = (
    "out of memory; take a smaller or a quantized model, shorter prompts, or fewer at a time"
)
# --num-draft does not accept 0, because the command lines have another option for regular decoding.
NUM_DRAFT = replace(
    SETTINGS["num_draft"].range, least=1, expected="a whole number, at least 1, or auto"
)
FLAGS = {"true": True, "false": False}


class HelpFormatter(argparse.HelpFormatter):
    """Formats help: names a value once (`-n, --num N`), and keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        """Formats help for 80 columns."""
        super().__init__(prog, max_help_position=28, width=79)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that reports every mistake as one line that starts with `error:`."""

    def __init__(self, *examples: str, needs: str = "", **options: Any) -> None:
        """Makes a parser; its help has the required options (`needs`) first and `examples` last."""
        text = "\n  ".join(["examples:", *examples]) if examples else None
        usage = f"%(prog)s {needs} [options]".replace("  ", " ")
        options = {"usage": usage, "epilog": text, **options}
        # No abbreviations, so that new options never change the meaning of a script.
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Prints the message on one line, and exits with status 2."""
        message = " ".join(message.removeprefix("argument ").split())
        if message.startswith("unrecognized"):
            message += "; see --help"
        self.exit(BAD_INPUT, f"error: {message}\n")


def run(
    command: Callable[[], int],
    requirements: str = "requirements.txt",
    interrupted: str = "interrupted",
) -> int:
    """Runs a command line and reports errors as one line on standard error.

    Args:
        command: parses the arguments, does the work and returns the exit status.
        requirements: the command's requirements file, named in errors about a missing package.
        interrupted: the message after Ctrl-C; if empty, nothing is printed.

    Returns:
        The exit status.
    """
    open_streams()
    try:
        return command()
    except KeyboardInterrupt:
        if interrupted:
            log(interrupted)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except ImportError as error:
        message = not_installed(error, requirements)
    except (UserError, OSError) as error:
        message = str(error) if isinstance(error, UserError) else reason(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = NO_MEMORY
    log(f"error: {message}")
    return BAD_INPUT


def not_installed(error: ImportError, requirements: str = "requirements.txt") -> str:
    """Returns the error message for a missing package."""
    cause = reason(error).rstrip(".:")
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        cause = f"{package} is not installed"
        listed = (ROOT / requirements).read_text(encoding="utf-8").replace("-", "_")
        if not re.search(rf"^{package}\b", listed, re.MULTILINE):
            requirements = "requirements.txt"
    return f"{cause}; pip install -r {requirements}"


def open_streams() -> None:
    """Makes the standard streams safe: replaces closed ones, and lets any file name be printed.

    If a stream stayed closed, the next file to be opened would get the stream's descriptor, and C
    libraries would write their messages into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may have bytes that are not Unicode; they are printed like "\\udce9".
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def within(allowed: Range) -> Callable[[str], Any]:
    """Returns an argparse type that accepts the values of a range."""

    def parse(text: str) -> Any:
        value: Any = text
        with contextlib.suppress(ValueError):
            value = FLAGS.get(text.lower(), text) if allowed.kind is bool else allowed.kind(text)
        fitting = allowed.fit(value)
        if fitting is None:
            expected = allowed.expected
            if allowed.kind is bool:  # written in lower case, unlike in Python
                expected = " or ".join([*FLAGS, *allowed.besides])
            raise argparse.ArgumentTypeError(f"give {expected}, not {written(text)}")
        return fitting

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Returns an argparse type that accepts whole numbers from `least` on."""
    return within(Range(int, least, math.inf, f"a whole number, at least {least}"))


def between(low: float, high: float) -> Callable[[str], float]:
    """Returns an argparse type that accepts numbers from `low` to `high`."""
    return within(Range(float, low, high, f"a number from {low} to {high}"))


def add_number(
    group: argparse._ActionsContainer,
    names: str,
    type: Callable[[str], Any],
    default: Any,
    help: str,
    metavar: str = "N",
) -> None:
    """Adds an option that takes a number, or several numbers if the default is a list.

    Args:
        group: the group to add the option to.
        names: the option's names, separated by spaces.
        type: the option's argparse type.
        default: the option's default.
        help: the option's help; a default other than None or an empty list is appended.
        metavar: the number's name in the help.
    """
    several = isinstance(default, list)
    shown = " ".join(map(str, default)) if several else default
    suffix = "" if default in (None, []) else f" (default: {shown})"
    group.add_argument(
        *names.split(),
        type=type,
        default=default,
        nargs="+" if several else None,
        metavar=metavar,
        help=f"{help}{suffix}",
    )


def option_of(name: str) -> str:
    """Returns the option of a setting, such as --num-draft for num_draft."""
    return f"--{name.replace('_', '-')}"


def add_setting(
    group: argparse._ActionsContainer,
    option: str,
    help: str = "",
    default: Any = None,
    allowed: Range | None = None,
) -> None:
    """Adds the option of a setting that settings.py declares.

    Args:
        group: the group to add the option to.
        option: the option's name, such as --num-draft.
        help: the option's help; if empty, the setting's help is used. The default is appended.
        default: the option's default; if None, the setting's default is used.
        allowed: the option's range; if None, the setting's range is used.
    """
    setting = SETTINGS[option.removeprefix("--").replace("-", "_")]
    help, allowed = help or setting.help, allowed or setting.range
    if default is None:
        default = setting.default
    metavar = option[2].upper()
    if allowed.kind is bool:
        metavar, default = f"{{{','.join([*FLAGS, *allowed.besides])}}}", str(default).lower()
    names = f"{setting.flag or ''} {option}"
    add_number(group, names, within(allowed), default, help, metavar)


def add_models(group: argparse._ActionsContainer) -> None:
    """Adds the options that name the models."""
    group.add_argument(
        "--model",
        "--model-name",
        metavar="NAME",
        help="the target: a folder, the name of one in models/, or a Hub id, which is converted "
        "into models/ once (default: t5-11b with t5-small if models/ has both, else the bundled "
        "pair)",
    )
    group.add_argument(
        "--draft-model",
        "--draft-model-name",
        metavar="NAME",
        help="the draft, named in the same way; lookup: copy from the source instead; NAME+lookup: "
        "both; none: regular decoding (default: the target's default draft)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        metavar="TYPE",
        help="bfloat16, float16 or float32 (default: the folder's; float32 without a GPU)",
    )
    group.add_argument(
        "--adapter-path",
        metavar="FOLDER",
        help="a PEFT LoRA adapter to merge into the target",
    )
    group.add_argument(
        "--ignore-generation-config",
        action="store_true",
        help="ignore the defaults in the target's own files",
    )


def add_speed(group: argparse._ActionsContainer, without: str) -> None:
    """Adds --num-draft, --delta and --exact.

    Args:
        group: the group to add the options to.
        without: the option that turns drafting off, such as --regular-decode; messages name it.
    """
    expected = f"{NUM_DRAFT.expected} (or {without} for no draft)"
    add_setting(group, "--num-draft", allowed=replace(NUM_DRAFT, expected=expected))
    add_setting(group, "--delta")
    group.add_argument(
        "--exact",
        action="store_true",
        help="same bits with any draft and any batch; slower",
    )


def parsed(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Returns options of the dataclass `kind`, made from the values that argparse has parsed."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns, by name, those options that are fields of `Settings` and are not None."""
    names = [field.name for field in fields(Settings) if options.get(field.name) is not None]
    return {name: options[name] for name in names}
