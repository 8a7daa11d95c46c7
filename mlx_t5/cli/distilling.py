"""Defines and checks the options of distill.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mlx_t5.cli.arguments import Parser, add_number, add_setting, at_least, parsed, within
from mlx_t5.cli.training import add_course, check_output
from mlx_t5.cli.uploading import add_upload_option, check_repository
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO, LOOKUP, NONE, Range

ALL = "all"  # value of --draft-vocab-size


@dataclass(frozen=True)
class DistillOptions:
    """The command line of distill.py, as `--help` explains it."""

    model: str
    data: str
    output: str
    adapter_path: str | None
    draft_model: str | None
    decoder_layers: int | None
    share_encoder: bool | None
    draft_vocab_size: int | str | None
    iters: int
    batch_size: int
    learning_rate: float
    temp: float
    max_tokens: int
    steps_per_eval: int
    save_every: int
    seed: int
    resume: bool
    upload_repo: str | None


def distill_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser(
        "distill.py --model my-t5 --data prompts.txt --output my-draft",
        "distill.py --model my-t5 --data prompts.txt --output my-draft --resume",
        needs="--model NAME --data FILE --output FOLDER",
        description="Make a draft for a T5 from prompts, and measure whether it is faster.",
    )
    add = parser.add_argument_group("models and data").add_argument
    add(
        "--model",
        required=True,
        help="the target: a folder, the name of one in models/, or a Hub id",
    )
    add(
        "--data",
        required=True,
        metavar="FILE",
        help='prompts, one a line, or objects {"prompt": …, "completion": …} if the name ends '
        "in .jsonl; a completion is the target's own answer, if you have it already",
    )
    add("--output", required=True, metavar="FOLDER", help="the model folder to write")
    add(
        "--adapter-path",
        metavar="FOLDER",
        help="a PEFT LoRA adapter to merge into the target before the draft is made",
    )
    _add_draft(parser.add_argument_group("draft"))
    _add_training(parser.add_argument_group("training"))
    add_upload_option(parser.add_argument_group("upload"))
    return parser


def _add_draft(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--draft-model", metavar="NAME", help="train this model, instead of one cut from the target"
    )
    add_number(
        group,
        "--decoder-layers",
        type=at_least(1),
        default=None,
        help="number of the target's decoder layers that the draft copies (default: 1)",
    )
    add(
        "--share-encoder",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the draft uses the target's encoder, embedding and output head, and only its decoder "
        "is trained (default); --no-share-encoder gives it copies, which are trained too",
    )
    sizes = Range(int, 1, math.inf, f"a whole number, at least 1, or {ALL}", besides=(ALL,))
    add_number(
        group,
        "--draft-vocab-size",
        type=within(sizes),
        default=None,
        help="number of tokens that the draft may propose: the ones that the target writes most "
        f"often, whose rows its output head keeps; {ALL}: the whole vocabulary (default: the "
        f"smallest multiple of 1,024 that covers 99.5 %% of the held-out answers, but {ALL} "
        "with --no-share-encoder)",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    number = partial(add_number, group)
    number("--iters", at_least(0), 1000, "maximum number of training steps; 0 trains nothing")
    number("--batch-size", at_least(1), 32, "prompts per step")
    rate = Range(float, 1e-6, 1.0, "a number from 1e-6 to 1")
    number(
        "--learning-rate",
        within(rate),
        0.03,
        "largest change per step, relative to a tensor's scale",
    )
    add_setting(group, "--temp", help="temperature at which you will sample later")
    add_setting(group, "--max-tokens", help="maximum number of tokens in an answer")
    add_course(group, "seed that chooses held-out prompts, the order and sampled answers")


def read_distill_options(argv: Sequence[str]) -> DistillOptions:
    """Returns the parsed command line; checks that its output can be written and uploaded.

    Raises:
        UserError: some options are incompatible, or the output exists already.
    """
    args = parsed(DistillOptions, vars(distill_parser().parse_args(argv)))
    from mlx_t5.checkpoints.writing import is_model_file

    if args.draft_model is not None and args.decoder_layers is not None:
        raise UserError("--decoder-layers cuts a draft from the target; leave --draft-model out")
    if args.draft_model is not None and args.share_encoder is not None:
        raise UserError("--draft-model has its encoder or not already; leave --share-encoder out")
    if args.iters == 0 and (args.draft_model is None or args.draft_vocab_size == ALL):
        raise UserError(
            "--iters 0 trains nothing and gives a draft that is there a smaller vocabulary; name "
            f"the draft with --draft-model, and leave --draft-vocab-size {ALL} out"
        )
    for name in (args.output, args.draft_model):  # main.py would not read these as folders
        if name in (NONE, AUTO, LOOKUP) or (name or "").endswith(f"+{LOOKUP}"):
            raise UserError(f"{name} as a --draft-model is no folder; give another name")
    if args.upload_repo is not None and args.adapter_path is not None:
        cure = "leave --upload-repo out, and send the folder with hf upload"
        raise UserError(f"the card of a draft for an adapted model cannot name the adapter; {cure}")
    check_output(args.output, args.resume, is_model_file)
    check_repository(args.upload_repo)
    return args
