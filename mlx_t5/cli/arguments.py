"""Common parts of the command lines: parser, exit status, error messages and options.

Nothing here imports MLX, so `--help` and error messages do not wait for its import.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

from mlx_t5 import settings
from mlx_t5.drafting.named import DRAFTERS
from mlx_t5.errors import UserError, is_out_of_memory, log, reason
from mlx_t5.installation import command, cure
from mlx_t5.settings import AUTO, DTYPES, LARGEST_COUNT, NONE, SETTINGS, Range, Repetition, written
from mlx_t5.starting import interrupts_deferred

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE
NO_MEMORY = (
    "out of memory; take a smaller or a quantized model, shorter prompts, or fewer at a time"
)
FLAGS = {"true": True, "false": False}
REQUIRED = object()  # the default of an option that the user must give


class Parser(argparse.ArgumentParser):
    """A parser that reports every mistake as one line that starts with `error:`."""

    def __init__(self, name: str = "", *examples: str, needs: str = "", **options: Any) -> None:
        """A command's help has the required options (`needs`) first and `examples` last."""
        if name:
            options["prog"] = command(name)
            lines = [f"{options['prog']} {example}".rstrip() for example in examples]
            options["epilog"] = "\n  ".join(["examples:", *lines])
        width = max(shutil.get_terminal_size().columns - 2, 20)
        options["description"] = textwrap.fill(options.get("description", ""), width)
        options.setdefault("usage", f"%(prog)s {needs} [options]".replace("  ", " "))
        raw = argparse.RawDescriptionHelpFormatter  # keeps the examples' line breaks
        layout = partial(raw, max_help_position=28, width=width)
        # No abbreviations, so that new options never change the meaning of a script.
        super().__init__(allow_abbrev=False, formatter_class=layout, **options)

    def given(self, options: Mapping[str, Option], argv: Sequence[str] | None) -> dict[str, Any]:
        """The values of these options that the user gives, by name."""
        add_options(self, options)
        return vars(self.parse_args(argv))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Takes other programs' names of options, too; refuses what it does not know."""
        words = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            plain = name.lstrip("-").replace("-", "_")
            other = option_of(settings.ALIASES.get(plain, plain))
            if name not in known and name.startswith("-") and other in known:
                words[i] = f"{other}{equals}{value}"
        result, rest = super().parse_known_args(words, namespace)
        if rest:
            unknown = rest[0].partition("=")[0]
            others = [
                option_of(a) for a, name in settings.ALIASES.items() if option_of(name) in known
            ]
            cure = settings.did_you_mean(unknown, [*known, *others]) or "; see --help"
            if not unknown.startswith("-") and "--prompt" in known:
                loose = list(takewhile(lambda word: not word.startswith("-"), rest))
                meant = f"--prompt {shlex.quote(' '.join(loose))}"
                if os.path.exists(rest[0]):
                    meant = f"--input-file {shlex.join(loose)}"
                cure = f"; did you mean {meant}?"
            self.error(f"unrecognized arguments: {' '.join(rest)}{cure}")
        return result, rest

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.removeprefix("argument ").split())
        self.exit(BAD_INPUT, f"error: {message}\n")


def run(work: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Runs a command line, reports errors as one line on standard error, and returns the status.

    Args:
        work: parses the arguments, does the work and returns the exit status.
        interrupted: the message after Ctrl-C; if empty, nothing is printed.
    """
    open_streams()
    try:
        return work()
    except KeyboardInterrupt:
        if interrupted:
            log(interrupted)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
    log(f"error: {message}")
    return BAD_INPUT


def message_of(error: Exception) -> str | None:
    """The line that a user reads; None for an error of the program itself."""
    if isinstance(error, ImportError):
        return not_installed(error)
    if is_out_of_memory(error):
        return NO_MEMORY
    if isinstance(error, OSError):
        return reason(error)
    return str(error) if isinstance(error, UserError) else None


def run_command(
    name: str, read: Callable[[Any], Any], interrupted: str, argv: Sequence[str] | None
) -> int:
    """Runs a command whose options `read` parses and checks; the rest is as in `run`."""
    return run(lambda: run_body(name, read(argv)), interrupted)


def run_body(name: str, options: Any) -> int:
    """Runs a command's body, which is imported only now because it imports MLX."""
    with interrupts_deferred():
        body = import_module(f"mlx_t5.cli.{name}_command")
    return getattr(body, f"{name}_command")(options)


def not_installed(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    cause = reason(error).rstrip(".:")
    if isinstance(error, ModuleNotFoundError) and package:
        cause = f"{package} is not installed"
    return f"{cause}; {cure(package)}"


def resuming_command(name: str, argv: Sequence[str]) -> str:
    """The command line to type after Ctrl-C."""
    words = [word for word in argv if word not in ("--resume", "--overwrite")]
    return f"{command(name)} {shlex.join([*words, '--resume'])}"


def open_streams() -> None:
    """Makes the standard streams safe: replaces closed ones, and lets any file name be printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # The next file to be opened would get a closed stream's descriptor, and what C libraries
        # print would go into that file.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may have bytes that are not Unicode; they are printed like "\\udce9".
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def within(allowed: Range, text: str) -> Any:
    """What a text means as a value of a range, for argparse."""
    value: Any = text
    with contextlib.suppress(ValueError):
        value = FLAGS.get(text.lower(), text) if allowed.kind is bool else allowed.kind(text)
    fitting = allowed.fit(value)
    if fitting is None:
        expected = allowed.expected
        if allowed.kind is bool:  # written in lower case, unlike in Python
            expected = " or ".join([*FLAGS, *allowed.besides])
        raise argparse.ArgumentTypeError(f"{expected}, not {written(text)}")
    return fitting


def at_least(least: int, besides: tuple = (), **more: Any) -> Range:
    """The range of whole numbers from `least` on, with the values `besides`."""
    expected = ", or ".join([f"a whole number, at least {least}", *map(str, besides)])
    return Range(int, least, math.inf, expected, besides, **more)


def between(low: float, high: float) -> Range:
    return Range(float, low, high, f"a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class Option:
    """The declaration of an option."""

    help: str  # the default is appended, unless it is None, False or ""
    default: Any = None  # REQUIRED if the user must give it
    # str for any text, a range of numbers, a tuple of choices, a function that reads the text, or
    # bool for a switch; with the default None a switch has a --no-… too.
    kind: Range | tuple[str, ...] | Callable[[str], Any] = str
    group: str = ""  # its heading in the help; "": that of the option before it
    names: str = ""  # further names, separated by spaces
    metavar: str = ""
    several: bool | int = False  # takes several values at once, or so many; a tuple by default
    repeated: bool = False  # may be given several times
    default_text: str = ""  # the default as the help shows it, if not as it is

    def field(self) -> Any:
        """A dataclass field that declares this option."""
        default = {} if self.default is REQUIRED else {"default": self.default}
        return field(metadata={"option": self}, **default)

    def but(self, **changes: Any) -> Option:
        """This option with some attributes changed."""
        return replace(self, **changes)

    def add(self, name: str, group: argparse._ActionsContainer) -> None:
        names = [option_of(name), *self.names.split()]
        names.sort(key=lambda n: n.startswith("--"))  # -v before --verbose
        options: dict[str, Any] = {"metavar": self.metavar or None}
        if self.kind is bool:
            switch = argparse.BooleanOptionalAction if self.default is None else "store_true"
            options = {"action": switch}
        elif isinstance(self.kind, tuple):
            options["choices"] = self.kind
        elif not isinstance(self.kind, Range):
            options["type"] = self.kind
        else:
            choices = [*FLAGS, *self.kind.besides] if self.kind.kind is bool else []
            metavar = f"{{{','.join(choices)}}}" if choices else self.metavar or "N"
            options = {"type": partial(within, self.kind), "metavar": metavar}
        if self.several:
            options["nargs"] = "+" if self.several is True else self.several
        if self.several > 1:
            options["metavar"] = tuple(self.metavar.split())
        if self.repeated:
            options["action"] = "extend" if self.several else "append"
        required, default, help = self.default is REQUIRED, self.default, self.help
        if not (required or default in (None, "", ()) or self.kind is bool):
            values = default if self.several else [default]
            shown = self.default_text or " ".join(map(str, values))
            help += f" (default: {shown.lower() if isinstance(default, bool) else shown})"
        action = group.add_argument(*names, dest=name, required=required, help=help, **options)
        action.default = argparse.SUPPRESS  # the parser returns only what the user gives


def setting(name: str, **changes: Any) -> Option:
    """The option of a setting that settings.py declares, with some attributes changed."""
    s = SETTINGS[name]
    option = Option(s.help, s.default, s.range, names=s.flag, metavar=name[0].upper())
    return option.but(**changes)


def option(help: str, default: Any = None, kind: Any = str, **attributes: Any) -> Any:
    """A dataclass field that declares an option; see `Option`."""
    return Option(help, default, kind, **attributes).field()


def switch(help: str, **attributes: Any) -> Any:
    return option(help, False, bool, **attributes)


MODEL = Option(
    "the target: a folder, the name of one in models/, or a Hub id (default: t5-11b with t5-small "
    "if models/ has both, else the bundled pair)",
    names="--model-name",
    metavar="NAME",
    group="models",
)
_DRAFTERS = [f"{name}: {d.does} instead; NAME+{name}: both" for name, d in DRAFTERS.items()]
DRAFT_MODEL = Option(
    f"the draft, named in the same way; {'; '.join(_DRAFTERS)}; none: regular decoding "
    "(default: the target's default draft)",
    names="--draft-model-name",
    metavar="NAME",
)
DTYPE = Option("weights' type (default: the folder's; float32 without a GPU)", kind=DTYPES)
ADAPTER_PATH = Option("a PEFT LoRA adapter to merge into the model", metavar="FOLDER")
IGNORE_GENERATION_CONFIG = Option("ignore the defaults in the target's own files", False, bool)
TRANSLATION_PREFIX = Option(
    'template of the prefix that translates, such as "translate {source} to {target}: "',
    "",
    metavar="TEXT",
)
EXACT = Option("same bits with any draft and any batch; slower", False, bool)
UPLOAD_REPO = Option(
    "send the folder, with a model card, to the Hub", metavar="OWNER/NAME", group="upload"
)


def num_draft(cure: str = "", **changes: Any) -> Option:
    """The option --num-draft without 0; `cure` names the option that turns drafting off."""
    allowed = at_least(1, (AUTO,), ceiling=LARGEST_COUNT)
    if cure:
        allowed = replace(allowed, expected=f"{allowed.expected} (or {cure} for no draft)")
    return setting("num_draft", kind=allowed, **changes)


def repetition(text: str) -> Repetition:
    """Reads MAX_PATTERN_SIZE[,MIN_COUNT]."""
    size, count = map(int, (text if "," in text else f"{text},3").split(","))
    return Repetition(size, min_count=count)


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def options_of(kind: type) -> dict[str, Option]:
    options: dict[str, Option] = {}
    # A base class's options come last.
    for declared in sorted(fields(kind), key=lambda f: f.name not in kind.__annotations__):
        if "option" in declared.metadata:
            options[declared.name] = declared.metadata["option"]
        options |= declared.metadata.get("options", {})
    return options


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    heading = ""
    for name, declared in options.items():
        heading = declared.group or heading
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        declared.add(name, groups[heading])


def refuse(
    options: Mapping[str, Option],
    given: Mapping[str, Any],
    requires: Iterable[Sequence[str]] = (),
    conflicts: Iterable[Sequence[str]] = (),
) -> None:
    """Refuses options that do not fit together.

    An option with its default or with "none" counts as absent.

    Args:
        options: the options of the command.
        given: the values that the user gives, by name.
        requires: an option, and those of which it requires at least one.
        conflicts: an option, and those with which it cannot be combined. An option may be written
            with a value: "--iters 0".
    """
    present = set()
    for name, value in given.items():
        present.add(f"{option_of(name)} {value}")
        if value not in (options[name].default, NONE):
            present.add(option_of(name))
    for first, *others in conflicts:
        for other in others:
            if {first, other} <= present:
                raise UserError(f"{first} cannot be combined with {other}")
    for first, *others in requires:
        if first in present and not present.intersection(others):
            raise UserError(f"{first} requires {' or '.join(others)}")
