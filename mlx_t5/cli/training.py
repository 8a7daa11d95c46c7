"""What distill.py and finetune.py share: options, and resuming."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import UPLOAD_REPO, at_least, option, option_of, switch
from mlx_t5.settings import Range

# Options that may change when a run is resumed; --data and --valid are compared by their content.
MAY_CHANGE = (
    "output", "resume", "iters", "steps_per_eval", "save_every", "steps_per_report", "patience",
    "metrics_file", "grad_checkpoint", "upload_repo", "data", "valid", "source_language",
    "target_language",
)  # fmt: skip
LARGEST_SEED = 2**53 - 1  # the seeds derived for single prompts are larger


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options that the commands share, and show last in their help."""

    steps_per_report: int = option("steps between lines about loss and speed", 10, at_least(1))
    steps_per_eval: int = option("steps between evaluations on held-out prompts", 100, at_least(1))
    patience: int = option("end after N evaluations without a new best; 0: never", 0, at_least(0))
    save_every: int = option("steps between saved states", 100, at_least(1))
    metrics_file: str | None = option("append the numbers to this .jsonl file", metavar="FILE")
    seed: int = option(
        "seed that chooses held-out prompts, the order and all that is random",
        0,
        Range(int, 0, LARGEST_SEED, f"a whole number from 0 to {LARGEST_SEED}"),
    )
    resume: bool = switch("resume or extend an earlier run")
    upload_repo: str | None = UPLOAD_REPO.field()


def resumable(name: str, read: Callable[[Sequence[str]], Any], argv: Sequence[str] | None) -> int:
    """Runs a command line that trains; after Ctrl-C, prints how to resume.

    Args:
        name: the command's name.
        read: parses and checks the arguments, among them --output and --resume.
        argv: the arguments; None stands for the process's own arguments.
    """
    argv = sys.argv[1:] if argv is None else list(argv)

    def training() -> int:
        args = read(argv)
        try:
            return arguments.run_body(name, args)
        except KeyboardInterrupt:
            hint = "nothing was written"
            if work_folder(args.output).exists():
                hint = f"go on with: {arguments.resuming_command(name, argv)}"
            say(f"interrupted; {hint}")
            return arguments.INTERRUPTED

    return arguments.run(training, interrupted="interrupted; nothing was written")


def say(line: str) -> None:
    """Prints a line on standard error, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def reporter(metrics_file: str | None) -> Callable[..., None]:
    """A function that prints a line, and appends the numbers that it is given to a file."""
    if metrics_file is not None:
        open(metrics_file, "a").close()  # an impossible file is an error at once

    def report(line: str, **numbers: float) -> None:
        say(line)
        if metrics_file is not None and numbers:
            finite = {name: n if math.isfinite(n) else None for name, n in numbers.items()}
            with open(metrics_file, "a") as file:
                file.write(json.dumps(finite) + "\n")

    return report


def compared_options(args: Any, examples: Iterable[Any]) -> dict[str, Any]:
    """The options that must not change when a run is resumed, by their names."""
    # Models are compared by the names that the user gives, data by the examples read from it.
    options = {option_of(n): value for n, value in vars(args).items() if n not in MAY_CHANGE}
    options["--iters"] = args.iters > 0  # with 0 the output is another one: nothing is trained
    # Last: other options change the digest too, and an error names the first difference.
    tokens = hashlib.sha256()
    for example in examples:
        tokens.update(repr((example.source, example.answer)).encode())
    return options | {"--data": tokens.hexdigest()}


def work_folder(output: str) -> Path:
    """The folder beside the output that holds the state for --resume."""
    path = Path(output).expanduser()
    return path.with_name(f"{path.name}-work")
