"""The options of `mlx_t5.finetune`, and the files that it reads.

The options have the names that they have in mlx-lm and PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import REQUIRED, Parser, at_least, between, option, switch
from mlx_t5.cli.training import TrainingOptions, resumable
from mlx_t5.cli.training_pairs import SUFFIXES
from mlx_t5.errors import UserError
from mlx_t5.installation import MODELS, command
from mlx_t5.text.languages import checked_template

if TYPE_CHECKING:
    from mlx_t5.checkpoints.adapters import LoraConfig

FULL = "full"
ADAFACTOR, ADAMW = "adafactor", "adamw"
RELATIVE = "relative"  # --lr-scheduler-type: Adafactor's own rate, as in T5's pre-training
RATES = {FULL: {ADAFACTOR: 1e-3, ADAMW: 1e-4}, "": {ADAFACTOR: 0.03, ADAMW: 1e-3}}
PARTS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}  # by file

CONFLICTS = (
    (f"--lr-scheduler-type {RELATIVE}", f"--optimizer {ADAMW}"),
    (f"--lr-scheduler-type {RELATIVE}", "--learning-rate", "--warmup-steps", "--weight-decay"),
    (f"--fine-tune-type {FULL}", "--target-modules", "--r", "--lora-alpha", "--lora-dropout"),
    (f"--fine-tune-type {FULL}", "--use-rslora"),
)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """The command line, with defaults filled in."""

    model: str = option("a folder, name in models/, or Hub id", REQUIRED, group="model and data")
    data: str = option(
        'a .jsonl file of objects {"prompt": …, "completion": …}, a .csv or .tsv file with these '
        "columns, or a folder with train, valid and test files; the names may also be input and "
        "output, source and target, or instruction, input and output",
        REQUIRED,
        metavar="FILE",
    )
    source_language: str | None = option(
        'name of the prompt in objects {"translation": {"en": …, "fr": …}}', metavar="CODE"
    )
    target_language: str | None = option("name of the completion in them", metavar="CODE")
    translation_prefix: str = arguments.TRANSLATION_PREFIX.field()
    valid: str | None = option(
        "pairs to evaluate by (default: the folder's, or a tenth)", metavar="FILE"
    )
    output: str = option("the adapter or model folder to write", REQUIRED, metavar="FOLDER")
    fine_tune_type: str = option(
        "train adapters, or the whole model", "lora", ("lora", "dora", FULL), group="adapter"
    )
    target_modules: Sequence[str] = option(
        "layers with an adapter: q v wi_0 …", ("all-linear",), metavar="NAME", several=True
    )
    r: int = option("rank of an adapter", 16, at_least(1))
    lora_alpha: float = option("an adapter's strength, divided by the rank", 32.0, between(0, 1e6))
    lora_dropout: float = option("dropped share of an adapter's input", 0.0, between(0, 0.9))
    use_rslora: bool = switch("divide by the square root of the rank instead")
    num_layers: int = option("train each stack's last N layers; -1: all", -1, at_least(1, (-1,)))
    iters: int = option("maximum number of training steps", 1000, at_least(1), group="training")
    batch_size: int = option("pairs per step", 16, at_least(1))
    optimizer: str = option(
        f"default: {ADAMW} for adapters, {ADAFACTOR} for a whole model", kind=(ADAMW, ADAFACTOR)
    )
    learning_rate: float = option(
        f"largest rate; with {ADAFACTOR} relative to a tensor's scale (default: for adapters "
        f"{RATES[''][ADAMW]:g} with {ADAMW} and {RATES[''][ADAFACTOR]:g} with {ADAFACTOR}, for "
        f"whole models {RATES[FULL][ADAMW]:g} and {RATES[FULL][ADAFACTOR]:g})",
        kind=between(1e-8, 1),
    )
    lr_scheduler_type: str = option(
        f"learning rate after the warm-up; linear: down to 0; {RELATIVE}: {ADAFACTOR}'s own rate",
        "linear",
        ("linear", "constant", RELATIVE),
    )
    weight_decay: float = option(
        "share of weights subtracted per step, times the rate; no norms, biases", 0.0, between(0, 1)
    )
    warmup_steps: int | None = option("steps of warm-up (default: 5 %% of all)", kind=at_least(0))
    max_seq_length: tuple[int, int] = option(
        "most tokens in a prompt and in a completion; longer prompts are cut, and pairs with "
        "longer completions left out",
        (512, 256),
        at_least(1),
        several=True,
    )
    grad_checkpoint: bool = switch("save memory: compute layers twice instead of storing values")


def read_finetune_options(argv: Sequence[str]) -> FinetuneOptions:
    options = arguments.options_of(FinetuneOptions)
    given = Parser(
        "finetune",
        "--model google/flan-t5-base --data pairs.jsonl --output my-lora",
        "--model my-t5 --data pairs/ --output my-t5-2 --fine-tune-type full",
        needs="--model NAME --data FILE --output FOLDER",
        description="Fine-tune a T5 on prompts and completions, or adapt it.",
    ).given(options, argv)
    schedule = {"warmup_steps": None} if given.get("warmup_steps") == 0 else {}  # fits all rates
    languages = ("--source-language", "--target-language")
    arguments.refuse(options, given | schedule, [languages, languages[::-1]], CONFLICTS)
    args = FinetuneOptions(**given)
    if len(args.max_seq_length) > 2:
        raise UserError("--max-seq-length: one or two whole numbers")
    full = args.fine_tune_type == FULL
    adafactor = full or args.lr_scheduler_type == RELATIVE
    optimizer = args.optimizer or (ADAFACTOR if adafactor else ADAMW)
    if args.translation_prefix:
        checked_template(args.translation_prefix)
    return replace(
        args,
        optimizer=optimizer,
        learning_rate=args.learning_rate or RATES[FULL if full else ""][optimizer],
        max_seq_length=(args.max_seq_length[0], args.max_seq_length[-1]),
    )


def lora_config(args: FinetuneOptions) -> LoraConfig:
    from mlx_t5.checkpoints.adapters import ALL_LINEAR, LoraConfig  # imports MLX

    named = tuple(args.target_modules)
    modules = ALL_LINEAR if named == (ALL_LINEAR,) else named
    lora: dict[str, Any] = {n: getattr(args, n) for n in ("r", "lora_alpha", "use_rslora")}
    return LoraConfig(**lora, use_dora=args.fine_tune_type == "dora", target_modules=modules)


def pair_files(data: str, valid: str | None) -> dict[str, str]:
    """The data files that exist, by their use: "train", "valid" or "test".

    Args:
        data: a file, or a folder with files named train, valid (or validation) and test.
        valid: a file for validation; None if the user gives none.
    """
    folder, data_files = Path(data).expanduser(), {"train": data}
    if folder.is_dir():
        files = [(part, folder / f"{n}{end}") for n, part in PARTS.items() for end in SUFFIXES]
        data_files = {part: str(file) for part, file in files if file.is_file()}
        if "train" not in data_files:
            raise UserError(f"{data} has no train.jsonl, .csv or .tsv; add it, or name a file")
    if valid is not None and "valid" in data_files:
        raise UserError(f"{data_files['valid']} is there to evaluate by; leave --valid out")
    return data_files if valid is None else data_files | {"valid": valid}


def next_commands(args: FinetuneOptions, prompts: Path, prompt: str) -> list[list[str]]:
    """Commands to suggest after fine-tuning: run the model, make a draft, serve both."""
    target = ["--model", args.model, "--adapter-path", args.output]
    if args.fine_tune_type == FULL:
        target = ["--model", args.output]
    draft = str(MODELS / f"{Path(args.output).name}-draft")
    return [
        [*command("generate").split(), *target, "--prompt", prompt],
        [*command("distill").split(), *target, "--data", str(prompts), "--output", draft],
        [*command("server").split(), *target, "--draft-model", draft],
    ]


main = partial(resumable, "finetune", read_finetune_options)
