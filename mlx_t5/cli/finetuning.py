"""Defines and checks the options of finetune.py, and finds the files that it reads.

The options have the names that they have in mlx-lm and PEFT.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_t5.cli.arguments import Parser, add_number, at_least, between, parsed, within
from mlx_t5.cli.training import add_course, check_output
from mlx_t5.errors import UserError
from mlx_t5.settings import Range

if TYPE_CHECKING:
    from mlx_t5.checkpoints.adapter_config import LoraConfig

FULL, KINDS = "full", ("lora", "dora", "full")
ADAFACTOR, ADAMW = "adafactor", "adamw"
RELATIVE = "relative"  # --lr-scheduler-type: Adafactor's own rate, as in T5's pre-training
RATES = {FULL: {ADAFACTOR: 1e-3, ADAMW: 1e-4}, "": {ADAFACTOR: 0.03, ADAMW: 1e-3}}
LENGTHS = [512, 256]
PARTS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}  # by file
SUFFIXES = (".tsv", ".jsonl")  # if a folder has both, .jsonl is read


@dataclass(frozen=True)
class FinetuneOptions:
    """The command line of finetune.py, as `--help` explains it, with defaults filled in."""

    model: str
    data: str
    valid: str | None
    output: str
    fine_tune_type: str
    target_modules: list[str]
    r: int
    lora_alpha: float
    lora_dropout: float
    use_rslora: bool
    num_layers: int
    iters: int
    batch_size: int
    optimizer: str
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int | None
    max_seq_length: tuple[int, int]  # of prompts, of completions
    grad_checkpoint: bool
    steps_per_report: int
    steps_per_eval: int
    save_every: int
    seed: int
    resume: bool


def finetune_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        "finetune.py --model google/flan-t5-base --data pairs.jsonl --output my-lora",
        "finetune.py --model my-t5 --data pairs/ --output my-t5-2 --fine-tune-type full",
        needs="--model NAME --data FILE --output FOLDER",
        description="Fine-tune a T5 on prompts and completions, or adapt it.",
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", required=True, help="a folder, the name of one in models/, or a Hub id")
    add(
        "--data",
        required=True,
        metavar="FILE",
        help='a .jsonl file of objects {"prompt": …, "completion": …}, a .tsv file of the '
        "two texts with a tab between them, or a folder with train, valid and test files",
    )
    add(
        "--valid",
        metavar="FILE",
        help="a file of pairs for evaluation (default: the folder's, or a tenth of --data)",
    )
    add(
        "--output",
        required=True,
        metavar="FOLDER",
        help=f"the PEFT adapter to write; with --fine-tune-type {FULL} the model folder",
    )
    _add_adapter(parser.add_argument_group("adapter"))
    _add_training(parser.add_argument_group("training"))
    return parser


def _add_adapter(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--fine-tune-type",
        choices=KINDS,
        default="lora",
        help="train LoRA or DoRA adapters, or the whole model (default: lora)",
    )
    add(
        "--target-modules",
        nargs="+",
        default=["all-linear"],
        metavar="NAME",
        help="layers with an adapter, such as q v wi_0 wo (default: all-linear: all of them)",
    )

    number = partial(add_number, group)
    number("--r", at_least(1), 16, "rank of an adapter")
    number("--lora-alpha", between(0, 1e6), 32.0, "an adapter's strength, divided by the rank")
    number("--lora-dropout", between(0, 0.9), 0.0, "share of an adapter's input that is dropped")
    add("--use-rslora", action="store_true", help="divide by the square root of the rank instead")
    number("--num-layers", at_least(-1), -1, "train the last N layers of each stack; -1: all")


def _add_training(group: argparse._ArgumentGroup) -> None:
    number = partial(add_number, group)
    number("--iters", at_least(1), 1000, "maximum number of training steps")
    number("--batch-size", at_least(1), 16, "pairs per step")
    _add_rates(group)
    number(
        "--max-seq-length",
        at_least(1),
        LENGTHS,
        "maximum number of tokens in a prompt and in a completion; longer pairs are left out",
    )
    group.add_argument(
        "--grad-checkpoint",
        action="store_true",
        help="save memory: compute each layer twice instead of storing its values",
    )
    number("--steps-per-report", at_least(1), 10, "steps between lines about loss and speed")
    add_course(group, "seed that chooses held-out pairs, the order, adapters and dropout")


def _add_rates(group: argparse._ArgumentGroup) -> None:
    number = partial(add_number, group)

    def choice(name: str, choices: Sequence[str], default: str | None, help: str) -> None:
        group.add_argument(name, choices=choices, default=default, help=help)

    defaults = f"optimizer (default: {ADAMW} for adapters, {ADAFACTOR} for a whole model)"
    choice("--optimizer", (ADAMW, ADAFACTOR), None, defaults)
    adapters, whole = RATES[""], RATES[FULL]
    number(
        "--learning-rate",
        within(Range(float, 1e-8, 1.0, "a number from 1e-8 to 1")),
        None,
        f"largest rate; with {ADAFACTOR} relative to a tensor's scale (default: for adapters "
        f"{adapters[ADAMW]:g} with {ADAMW} and {adapters[ADAFACTOR]:g} with {ADAFACTOR}, for whole "
        f"models {whole[ADAMW]:g} and {whole[ADAFACTOR]:g})",
    )
    schedules = f"learning rate after the warm-up; {RELATIVE} is {ADAFACTOR}'s own rate"
    help = f"{schedules} (default: linear, down to 0)"
    choice("--lr-scheduler-type", ("linear", "constant", RELATIVE), "linear", help)
    number("--warmup-steps", at_least(0), None, "steps of warm-up (default: 5 %% of all)")


def read_finetune_options(argv: Sequence[str]) -> FinetuneOptions:
    """Returns the parsed command line; checks that its output can be written.

    Raises:
        UserError: some options are incompatible, or the output exists already.
    """
    args = finetune_parser().parse_args(argv)
    from mlx_t5.checkpoints.adapter_config import CONFIG
    from mlx_t5.checkpoints.adapters import WEIGHTS
    from mlx_t5.checkpoints.writing import is_model_file

    full = args.fine_tune_type == FULL
    if len(args.max_seq_length) > 2:
        raise UserError("--max-seq-length takes one number, or two: of prompts and completions")
    if args.num_layers == 0:
        raise UserError("--num-layers 0 trains nothing; give a number from 1, or -1 for all")
    relative = args.lr_scheduler_type == RELATIVE
    args.optimizer = args.optimizer or (ADAFACTOR if full or relative else ADAMW)
    if relative and args.optimizer != ADAFACTOR:
        raise UserError(f"--lr-scheduler-type {RELATIVE} is {ADAFACTOR}'s; leave --optimizer out")
    if relative and (args.learning_rate or args.warmup_steps):
        raise UserError(f"--lr-scheduler-type {RELATIVE} has a rate of its own; leave others out")
    args.learning_rate = args.learning_rate or RATES[FULL if full else ""][args.optimizer]
    args.max_seq_length = tuple((args.max_seq_length * 2)[:2])
    is_output = is_model_file if full else {CONFIG, WEIGHTS[0]}.__contains__
    check_output(args.output, args.resume, is_output)
    return parsed(FinetuneOptions, vars(args))


def lora_config(args: FinetuneOptions) -> LoraConfig:
    """Returns the configuration of the requested adapters."""
    from mlx_t5.checkpoints.adapter_config import ALL_LINEAR, LoraConfig

    names = tuple(args.target_modules)
    return LoraConfig(
        r=args.r,
        lora_alpha=args.lora_alpha,
        use_rslora=args.use_rslora,
        use_dora=args.fine_tune_type == "dora",
        target_modules=ALL_LINEAR if names == (ALL_LINEAR,) else names,
    )


def pair_files(data: str, valid: str | None) -> dict[str, str]:
    """Returns the data files that exist, keyed by their use: "train", "valid" or "test".

    Args:
        data: a file, or a folder with files named train, valid (or validation) and test.
        valid: a file for validation; None if the user gives none.

    Raises:
        UserError: the folder has no training file, or two validation files are given.
    """
    folder, data_files = Path(data).expanduser(), {"train": data}
    if folder.is_dir():
        files = [(part, folder / f"{n}{end}") for n, part in PARTS.items() for end in SUFFIXES]
        data_files = {part: str(file) for part, file in files if file.is_file()}
        if "train" not in data_files:
            raise UserError(f"{data} has no train.jsonl and no train.tsv; add it, or name a file")
    if valid is not None and "valid" in data_files:
        raise UserError(f"{data_files['valid']} is there to evaluate by; leave --valid out")
    return data_files if valid is None else data_files | {"valid": valid}


def next_commands(
    model: str, output: str, full: bool, prompts: Path, prompt: str
) -> list[list[str]]:
    """Returns commands to suggest after fine-tuning: run the model, make a draft, serve both."""
    target = ["--model", output] if full else ["--model", model, "--adapter-path", output]
    draft = f"models/{Path(output).name}-draft"
    return [
        ["python", "main.py", *target, "--prompt", prompt],
        ["python", "distill.py", *target, "--data", str(prompts), "--output", draft],
        ["python", "server.py", *target, "--draft-model", draft],
    ]
