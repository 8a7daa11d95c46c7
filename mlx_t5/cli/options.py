"""The options of main.py, and which of them go together."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from mlx_t5.cli.arguments import (
    Parser,
    add_exact,
    add_generation_config,
    add_models,
    add_setting,
    add_speculation,
)
from mlx_t5.errors import UserError

EARLY_STOPPING = {"true": True, "false": False, "never": "never"}


def build_parser() -> Parser:
    """All options of the command line."""
    parser = Parser(
        prog="main.py",
        description="Run a T5 model several tokens at a time: a small draft model proposes, the "
        "target model checks. Without options: the bundled pair translates a sentence.",
        allow_abbrev=False,  # so that a script's options mean tomorrow what they mean today
    )
    add_models(parser.add_argument_group("models"))
    _prompt_options(parser.add_argument_group("prompts and results"))
    _decoding_options(parser.add_argument_group("decoding"))
    _one_pass_options(parser.add_argument_group("without generating"))
    return parser


def _prompt_options(group: argparse._ArgumentGroup) -> None:
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to work on; may be given several times; - reads standard input as one prompt",
    )
    prompts.add_argument(
        "--input-file",
        metavar="FILE",
        help='one prompt a line, or {"prompt": …} a line if the name ends in .jsonl; - reads '
        "standard input, one prompt a line; lines are UTF-8 and end with LF, CRLF or CR",
    )
    group.add_argument(
        "--output-file",
        metavar="FILE",
        help="write results here, in input order: one text a line, or the objects of --json if "
        "the name ends in .jsonl",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="resume where the output ends: its complete lines are kept",
    )
    group.add_argument(
        "--parallel",
        choices=("data",),
        help="under mlx.launch: data shares the lines of the input out among the ranks, which all "
        "have the file and the whole models",
    )
    group.add_argument(
        "--json", action="store_true", help="one JSON object a prompt, with tokens and statistics"
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="colour each token by who wrote it (brackets instead of colours if NO_COLOR is set)",
    )


def _decoding_options(group: argparse._ArgumentGroup) -> None:
    add = partial(add_setting, group)
    group.add_argument(
        "--task",
        metavar="NAME",
        help="put the prefix of this task of the model before every prompt, and take its settings, "
        "which options given override: summarization, translation_en_to_fr, …",
    )
    add_generation_config(group)
    add_speculation(group, without="--regular-decode")
    add_exact(group)
    add("--temp", help="temperature of sampling; 0 decodes greedily")
    add("--top-k", help="sample from the k likeliest tokens; 0: all")
    add("--top-p", help="sample from the likeliest tokens of this mass")
    add("--seed", default=0, help="of sampling; the same seed, the same text")
    add("-m", "--max-tokens", help="end a text after so many tokens")
    add("--batch-size", default=8, help="prompts decoded at the same time")
    add("--num-samples", default=1, help="texts a prompt; needs --temp above 0")
    add("--repetition-penalty", help="above 1 makes tokens of the text so far less likely; 1: off")
    add("--no-repeat-ngram-size", help="write no run of so many tokens twice; 0: off")
    add("--min-tokens", help="no end before so many tokens; 0: off")
    _beam_options(group)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="STRING",
        help="end a text before this string; may be given several times",
    )
    group.add_argument(
        "--regular-decode",
        action="store_true",
        help="the target alone, one token at a time, to compare with",
    )


def _one_pass_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--score",
        action="store_true",
        help='log-probabilities of given targets: --input-file has {"prompt": …, "target": …} a '
        "line; JSON lines out",
    )
    either.add_argument(
        "--embed",
        action="store_true",
        help="a vector a prompt: JSON lines, or an array of NumPy's if the name of --output-file "
        "ends in .npy",
    )
    group.add_argument("--normalize", action="store_true", help="with --embed: of length 1")


def _beam_options(group: argparse._ArgumentGroup) -> None:
    add = partial(add_setting, group)
    add("--num-beams", help="search with so many hypotheses, without a draft; 1: no search")
    add("--length-penalty", help="of beams: above 0 favours long texts, below 0 short ones")
    group.add_argument(
        "--early-stopping",
        choices=EARLY_STOPPING,
        help="of beams: end with as many texts as beams (true), or when none is likely (false) or "
        "able (never) to get better (default: false)",
    )
    add("--num-return-sequences", help="texts a prompt, the best of its beams")


def check_options(args: argparse.Namespace) -> None:
    """Refuses options that do not go together, before anything is read or loaded.

    Raises:
        UserError: some do not; the message names them.
    """
    if args.task is not None and not (args.prompt or args.input_file):
        raise UserError("--task puts its prefix before a prompt; give --prompt or --input-file")
    if sys.__stdout__ is None and not args.output_file:
        raise UserError("standard output is closed; name an --output-file")
    _check_one_pass(args)
    _check_files(args)


def _check_one_pass(args: argparse.Namespace) -> None:
    """Refuses options that do not go together with scores and vectors."""
    if args.score and not args.input_file:
        raise UserError('--score: give --input-file, with {"prompt": "…", "target": "…"} a line')
    if args.exact and (args.score or args.embed):
        raise UserError("--exact is for texts that are written; leave it out")
    if args.normalize and not args.embed:
        raise UserError("--normalize is for the vectors of --embed; leave it out")
    if (args.output_file or "").endswith(".npy") and not args.embed:
        raise UserError("--output-file: an array (.npy) is for the vectors of --embed")


def _check_files(args: argparse.Namespace) -> None:
    """Refuses what cannot be resumed or shared out."""
    if args.resume and not (args.input_file and args.output_file):
        raise UserError("--resume goes on with an output; give --input-file and --output-file")
    if args.resume and args.output_file.endswith(".npy"):
        raise UserError("--resume goes on with lines; name an --output-file that ends in .jsonl")
    if args.parallel and args.input_file in (None, "-"):
        raise UserError("--parallel data shares a file out; name it with --input-file")
    if args.parallel and not args.output_file:
        raise UserError("--parallel data has ranks write parts of a file; name an --output-file")
