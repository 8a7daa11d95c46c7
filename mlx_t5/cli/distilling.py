"""The options of distill.py, and which of them fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_t5.cli import training
from mlx_t5.cli.arguments import (
    ADAPTER_PATH,
    REQUIRED,
    UPLOAD_REPO,
    Parser,
    add_options,
    at_least,
    option,
    options_of,
    refuse,
    setting,
)
from mlx_t5.cli.uploading import check_repository
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO, LOOKUP, NONE, Range

ALL = "all"  # value of --draft-vocab-size
CONFLICTS = (
    ("--draft-model", "--decoder-layers", "--share-encoder"),
    ("--iters 0", f"--draft-vocab-size {ALL}"),
    ("--upload-repo", "--adapter-path"),  # the model card cannot name an adapter
)


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    model: str = option(
        "the target: a folder, the name of one in models/, or a Hub id",
        REQUIRED,
        group="models and data",
    )
    data: str = option(
        'prompts, one a line, or objects {"prompt": …, "completion": …} if the name ends in '
        ".jsonl; a completion is the target's own answer, if you have it already. Of other files "
        "for finetune.py, only the prompts are read",
        REQUIRED,
        metavar="FILE",
    )
    output: str = option("the model folder to write", REQUIRED, metavar="FOLDER")
    adapter_path: str | None = ADAPTER_PATH.but(
        help="a PEFT LoRA adapter to merge into the target before the draft is made"
    ).field()
    draft_model: str | None = option(
        "train this model, instead of one cut from the target", metavar="NAME", group="draft"
    )
    decoder_layers: int | None = option(
        "number of the target's decoder layers that the draft copies (default: 1)", kind=at_least(1)
    )
    share_encoder: bool | None = option(
        "the draft uses the target's encoder, embedding and output head, and only its decoder is "
        "trained (default); --no-share-encoder gives it copies, which are trained too",
        kind=bool,
    )
    draft_vocab_size: int | str | None = option(
        "number of tokens that the draft may propose: the ones that the target writes most often, "
        f"whose rows its output head keeps; {ALL}: the whole vocabulary (default: the smallest "
        f"multiple of 1,024 that covers 99.5 %% of the held-out answers, but {ALL} with "
        "--no-share-encoder)",
        kind=at_least(1, besides=(ALL,)),
    )
    iters: int = option(
        "maximum number of training steps; 0 trains nothing", 1000, at_least(0), group="training"
    )
    batch_size: int = option("prompts per step", 32, at_least(1))
    learning_rate: float = option(
        "largest change per step, relative to a tensor's scale",
        0.03,
        Range(float, 1e-6, 1.0, "a number from 1e-6 to 1"),
    )
    temp: float = setting("temp", help="temperature at which you will sample later").field()
    max_tokens: int = setting("max_tokens", help="maximum number of tokens in an answer").field()
    steps_per_report: int = training.STEPS_PER_REPORT.field()
    steps_per_eval: int = training.STEPS_PER_EVAL.field()
    patience: int = training.PATIENCE.field()
    save_every: int = training.SAVE_EVERY.field()
    metrics_file: str | None = training.METRICS_FILE.field()
    seed: int = training.SEED.but(
        help="seed that chooses held-out prompts, the order and sampled answers"
    ).field()
    resume: bool = training.RESUME.field()
    upload_repo: str | None = UPLOAD_REPO.field()


def distill_parser() -> Parser:
    parser = Parser(
        "distill.py --model my-t5 --data prompts.txt --output my-draft",
        "distill.py --model my-t5 --data prompts.txt --output my-draft --resume",
        needs="--model NAME --data FILE --output FOLDER",
        description="Make a draft for a T5 from prompts, and measure whether it is faster.",
    )
    add_options(parser, options_of(DistillOptions))
    return parser


def read_distill_options(argv: Sequence[str]) -> DistillOptions:
    """Parses the command line, and checks that its output can be written and uploaded."""
    given = distill_parser().given(argv)
    from mlx_t5.checkpoints.writing import is_model_file

    refuse(options_of(DistillOptions), given, [("--iters 0", "--draft-model")], CONFLICTS)
    args = DistillOptions(**given)
    for name in (args.output, args.draft_model):  # main.py would not read these as folders
        if name in (NONE, AUTO, LOOKUP) or (name or "").endswith(f"+{LOOKUP}"):
            raise UserError(f"{name} is not a folder for --draft-model; choose another name")
    training.check_output(args.output, args.resume, is_model_file)
    check_repository(args.upload_repo)
    return args
