"""Defines the options of main.py, and checks their combinations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5 import __version__
from mlx_t5.cli.arguments import (
    Parser,
    add_models,
    add_setting,
    add_speed,
    at_least,
    given_settings,
    option_of,
    parsed,
)
from mlx_t5.errors import UserError
from mlx_t5.settings import READABLE, SETTINGS, SPLITS, SUBTITLES, UNREADABLE, Settings

if TYPE_CHECKING:
    from mlx_t5.text.documents import Cutting

DEFAULT_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)


@dataclass(frozen=True)
class MainOptions:
    """The command line of main.py; `--help` explains the fields that are not listed here.

    Attributes:
        settings: the decoding settings that the user gives, keyed by name.
    """

    model: str | None
    draft_model: str | None
    dtype: str | None
    adapter_path: str | None
    prompt: list[str] | None
    input_file: str | None
    output_file: str | None
    resume: bool
    json: bool
    verbose: bool
    split: str
    prefix: str | None
    source_language: str
    max_source_tokens: int | None
    task: str | None
    ignore_generation_config: bool
    exact: bool
    regular_decode: bool
    score: bool
    embed: bool
    normalize: bool
    batch_size: int
    num_samples: int
    seed: int
    settings: Mapping[str, Any]

    @property
    def writes_text(self) -> bool:
        """Whether the output consists of texts, not of scores or vectors."""
        return not (self.score or self.embed)

    @property
    def is_document(self) -> bool:
        """Whether the whole input file is one document."""
        return self.split != "none" and not (self.input_file or ".jsonl").endswith(".jsonl")

    @property
    def file_type(self) -> str:
        """The suffix of subtitles; "" for a plain text, which may begin with a prefix."""
        return suffix if (suffix := _suffix(self.input_file)) in SUBTITLES else ""


def build_parser() -> Parser:
    """Returns the parser with all options."""
    parser = Parser(
        'main.py --prompt "translate English to French: I have two cats."',
        "main.py --model google/flan-t5-xl --input-file in.txt --output-file out.jsonl",
        prog="main.py",
        description="Run a T5 model several tokens at a time: a small draft model proposes, the "
        "target model checks. Without options: the bundled pair translates a sentence.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_models(parser.add_argument_group("models"))
    _prompt_options(parser.add_argument_group("prompts"))
    _document_options(parser.add_argument_group("documents"))
    _text_options(parser.add_argument_group("text"))
    _speed_options(parser.add_argument_group("speed"))
    _output_options(parser.add_argument_group("output"))
    _scoring_options(parser.add_argument_group("without generating"))
    # None means that the option is absent; then the model's files or `Settings` have the value.
    parser.set_defaults(**dict.fromkeys(field.name for field in fields(Settings)))
    return parser


def _prompt_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be given several times; - reads standard input as one prompt",
    )
    either.add_argument(
        "--input-file",
        metavar="FILE",
        help='one prompt a line; objects {"prompt": …} if the name ends in .jsonl; - reads '
        "standard input line by line",
    )


def _document_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--split",
        choices=SPLITS,
        metavar="HOW",
        help="sentences or lines: decode texts in such pieces and join the answers; a file is one "
        "document, unless it is .jsonl (default: none; sentences for .srt, .vtt)",
    )
    group.add_argument(
        "--prefix",
        metavar="TEXT",
        help="put this before every prompt or piece (default: the task's, or the one at the "
        "beginning of a document)",
    )
    group.add_argument(
        "--source-language",
        metavar="CODE",
        default="",
        help="language of the text (default: the prefix's, or en)",
    )
    group.add_argument(
        "--max-source-tokens",
        type=at_least(1),
        metavar="N",
        help="cut longer sentences at a comma or between words (default: n_positions of the "
        "model's config.json)",
    )


def _text_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--task",
        metavar="NAME",
        help="use the prefix and settings of this task of the model: summarization, "
        "translation_en_to_fr, …",
    )
    for name in SETTINGS:
        if name not in ("num_draft", "delta", "batch_size"):
            add_setting(group, option_of(name))
    group.add_argument(
        "--stop",
        action="append",
        metavar="STRING",
        help="end a text before this string; may be repeated",
    )


def _speed_options(group: argparse._ArgumentGroup) -> None:
    add_speed(group, without="--regular-decode")
    group.add_argument(
        "--regular-decode",
        action="store_true",
        help="decode with the target alone, one token at a time",
    )
    add_setting(group, "--batch-size")


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-file",
        metavar="FILE",
        help="write texts to this file, one a line; the objects of --json if its name ends in "
        ".jsonl",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue an incomplete output file",
    )
    group.add_argument(
        "--json", action="store_true", help="print JSON objects with tokens and statistics"
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="color each token by its origin",
    )


def _scoring_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--score",
        action="store_true",
        help='write log-probabilities for objects {"prompt": …, "target": …}',
    )
    either.add_argument(
        "--embed",
        action="store_true",
        help="write a vector for each prompt, as JSON lines or into a .npy file",
    )
    group.add_argument(
        "--normalize", action="store_true", help="with --embed: scale vectors to length 1"
    )


def read_options(argv: list[str] | None) -> MainOptions:
    """Returns the parsed and checked command line; an output file named *.jsonl implies --json.

    Raises:
        UserError: some options are incompatible; the message names them.
    """
    values = vars(build_parser().parse_args(argv))
    values["settings"] = given_settings(values)
    Settings(**values["settings"])
    if not values["split"]:
        subtitles = _suffix(values["input_file"]) in SUBTITLES
        values["split"] = "sentences" if subtitles else "none"
    values["json"] |= (values["output_file"] or "").endswith(".jsonl")
    options = parsed(MainOptions, values)
    _check(options)
    return options


def _check(options: MainOptions) -> None:
    """Refuses incompatible options, before anything is read or loaded."""
    output_file = options.output_file or ""
    if options.task is not None and not (options.prompt or options.input_file):
        raise UserError("--task puts its prefix before a prompt; give --prompt or --input-file")
    if sys.__stdout__ is None and not output_file:
        raise UserError("standard output is closed; name an --output-file")
    if options.score and not options.input_file:
        raise UserError(
            '--score: give --input-file, with {"prompt": "…", "target": "…"} on each line'
        )
    if options.exact and not options.writes_text:
        raise UserError("--exact is for texts that are written; leave it out")
    if options.normalize and not options.embed:
        raise UserError("--normalize is for the vectors of --embed; leave it out")
    if output_file.endswith(".npy") and not options.embed:
        raise UserError("--output-file: an array (.npy) is for the vectors of --embed")
    _check_documents(options)
    if options.resume and not (options.input_file and output_file):
        raise UserError("--resume goes on with an output file; give --input-file and --output-file")
    if options.resume and output_file.endswith(".npy"):
        raise UserError("--resume goes on with lines; name an --output-file that ends in .jsonl")
    pipe = options.input_file == "-" or Path(options.input_file or "").is_fifo()
    if options.resume and pipe and not options.json:  # a pipe's prompts may have changed
        raise UserError(
            "--resume of a pipe needs an --output-file that ends in .jsonl; or name a file"
        )


def _suffix(name: str | None) -> str:
    return Path(name or "").suffix.lower()


def _check_documents(options: MainOptions) -> None:
    """Refuses options that are incompatible with documents, or that need a document."""
    if options.split == "none":
        for name in ("source_language", "max_source_tokens"):
            if getattr(options, name):
                raise UserError(f"{option_of(name)} is for documents; give --split as well")
        return
    if not options.writes_text:
        name = "--score" if options.score else "--embed"
        raise UserError(f"{name} reads one prompt a line, not documents; give --split none")
    if (suffix := _suffix(options.input_file)) in UNREADABLE:
        raise UserError(f"--split cannot read {suffix} files; convert the file to {READABLE}")
    if options.num_samples > 1 or options.settings.get("num_return_sequences", 1) > 1:
        name = "--num-samples" if options.num_samples > 1 else "--num-return-sequences"
        raise UserError(f"a document that is split has one text; leave {name} out")
    if options.is_document and options.resume:
        cure = "leave --resume out, or give documents as JSON lines"
        raise UserError(f"--resume is for lines, and this file is one document; {cure}")


def cutting_of(options: MainOptions, prefix: str) -> Cutting | None:
    """Returns how to cut texts into pieces; None without --split.

    Args:
        options: the options of the command line.
        prefix: the prefix for every piece: the value of --prefix or, without --prefix, the prefix
            in the model's own files. If there is neither, each text is searched for a prefix at
            its beginning; see `Cutting`.
    """
    from mlx_t5.text.documents import Cutting

    if options.split == "none":
        return None
    fixed_prefix = prefix if prefix or options.prefix is not None else None
    limit, language = options.max_source_tokens, options.source_language
    return Cutting(options.split, fixed_prefix, language, limit, options.file_type)
