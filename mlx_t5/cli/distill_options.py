"""The options of `mlx_t5.distill`, and which of them fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import REQUIRED, Parser, at_least, between, option, setting
from mlx_t5.cli.training import TrainingOptions, resumable
from mlx_t5.drafting.named import split_name
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO, NONE

ALL = "all"  # value of --draft-vocab-size
CONFLICTS = (
    ("--draft-model", "--decoder-layers", "--share-encoder"),
    ("--iters 0", f"--draft-vocab-size {ALL}"),
    ("--upload-repo", "--adapter-path"),  # the model card cannot name an adapter
)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(TrainingOptions):
    model: str = option("a folder, name in models/, or Hub id", REQUIRED, group="models and data")
    data: str = option(
        'prompts, one a line, or objects {"prompt": …, "completion": …} if the name ends in '
        ".jsonl; a completion is the target's own answer, if you have it already. Of other files "
        "for fine-tuning, only the prompts are read",
        REQUIRED,
        metavar="FILE",
    )
    output: str = option("the model folder to write", REQUIRED, metavar="FOLDER")
    adapter_path: str | None = arguments.ADAPTER_PATH.field()
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
        "number of tokens that the draft may propose, those that the target writes most often; "
        f"{ALL}: the whole vocabulary (default: the multiple of 1,024 that covers 99.5 %% of the "
        f"held-out answers, but {ALL} with --no-share-encoder)",
        kind=at_least(1, besides=(ALL,)),
    )
    iters: int = option("maximum number of steps; 0: none", 1000, at_least(0), group="training")
    batch_size: int = option("prompts per step", 32, at_least(1))
    learning_rate: float = option("rate, relative to a tensor's scale", 0.03, between(1e-6, 1))
    temp: float = setting("temp", help="temperature at which you will sample later").field()
    max_tokens: int = setting("max_tokens", help="maximum number of tokens in an answer").field()


def read_distill_options(argv: Sequence[str]) -> DistillOptions:
    options = arguments.options_of(DistillOptions)
    given = Parser(
        "distill",
        "--model my-t5 --data prompts.txt --output my-draft",
        "--model my-t5 --data prompts.txt --output my-draft --resume",
        needs="--model NAME --data FILE --output FOLDER",
        description="Make a draft for a T5 from prompts, and measure whether it is faster.",
    ).given(options, argv)
    arguments.refuse(options, given, [("--iters 0", "--draft-model")], CONFLICTS)
    args = DistillOptions(**given)
    for name in (args.output, args.draft_model):  # main.py would not read these as folders
        if name in (NONE, AUTO) or split_name(name or "")[1]:
            raise UserError(f"{name} is not a folder for --draft-model; choose another name")
    return args


main = partial(resumable, "distill", read_distill_options)
