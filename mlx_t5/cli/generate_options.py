"""The options of `mlx_t5.generate` (main.py), and which of them fit together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_t5 import __version__
from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import Option, Parser, at_least, log, option, setting, switch
from mlx_t5.cli.input import Line, LineReader, Lines, read_document, read_prompts
from mlx_t5.cli.output import check_output_file
from mlx_t5.errors import UserError
from mlx_t5.settings import OF_A_PROMPT, READABLE, SPLITS, SUBTITLES, UNREADABLE, Settings
from mlx_t5.text.languages import checked_template
from mlx_t5.text.prompts import split_unit

DEFAULT_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
# The options whose values become `Settings`; absent ones come from the model's own files.
SETTINGS_OPTIONS = {name: setting(name, group=s.group) for name, s in OF_A_PROMPT.items()} | {
    "num_draft": arguments.num_draft("--regular-decode", group="speed"),
    "stop": Option(
        "end a text before this string; may be repeated",
        metavar="STRING",
        repeated=True,
        group="text",
    ),
}
ARRAY = "--output-file FILE.npy"
REQUIRES = (
    ("--task", "--prompt", "--input-file"),
    ("--score", "--input-file"),
    ("--normalize", "--embed"),
    (ARRAY, "--embed"),
    ("--source-language", "--split", "--target-language"),
    ("--max-source-tokens", "--split", "--target-language"),
    ("--target-language", "--prompt", "--input-file"),
    ("--translation-prefix", "--target-language"),
    ("--encoding", "--input-file"),
    ("--resume", "--input-file"),
    ("--resume", "--output-file"),
)
CONFLICTS = (
    ("--prompt", "--input-file"),
    ("--score", "--embed", "--exact", "--split"),
    ("--embed", "--exact", "--split"),
    ("--exact", "--delta", "--num-beams"),
    ("--num-beams", "--num-draft", "--delta", "--temp"),
    ("--regular-decode", "--draft-model", "--num-draft", "--delta"),
    ("--split", "--num-samples", "--num-return-sequences"),
    ("--target-language", "--prefix", "--task", "--score", "--embed", "--exact"),
)
WITHOUT_DRAFT = ("--draft-model none", "--num-draft", "--delta")


@dataclass(frozen=True, kw_only=True)
class MainOptions:
    model: str | None = arguments.MODEL.field()
    draft_model: str | None = arguments.DRAFT_MODEL.field()
    dtype: str | None = arguments.DTYPE.field()
    adapter_path: str | None = arguments.ADAPTER_PATH.field()
    ignore_generation_config: bool = arguments.IGNORE_GENERATION_CONFIG.field()
    prompt: list[str] | None = option(
        "may be repeated; -: standard input", metavar="TEXT", repeated=True, group="prompts"
    )
    input_file: str | None = option(
        'one prompt a line; .jsonl: objects {"prompt": …}; -: standard input', metavar="FILE"
    )
    encoding: str = option("the file's encoding, as cp1252 (default: UTF-8)", "", metavar="NAME")
    target_language: str = option(
        "translate into this language by sentences", "", metavar="CODE", group="documents"
    )
    source_language: str = option("text's language (default: the prefix's)", "", metavar="CODE")
    translation_prefix: str = arguments.TRANSLATION_PREFIX.field()
    split: str | None = option(
        "sentences or lines: decode texts in such pieces and join the answers; a file is one "
        "document, unless it is .jsonl (default: none; sentences for .srt, .vtt)",
        kind=SPLITS,
        metavar="HOW",
    )
    prefix: str | None = option(
        "put this before every prompt or piece (default: the task's or document's)", metavar="TEXT"
    )
    max_source_tokens: int | None = option(
        "cut longer sentences between words (default: the model's n_positions)", kind=at_least(1)
    )
    task: str | None = option(
        "a task's prefix and settings: translation_en_to_fr, …", metavar="NAME", group="text"
    )
    # Only the settings that the user gives.
    settings: Mapping[str, Any] = field(metadata={"options": SETTINGS_OPTIONS})
    num_samples: int = setting("num_samples").field()
    seed: int = setting("seed").field()
    exact: bool = arguments.EXACT.but(group="speed").field()
    regular_decode: bool = switch("decode with the target alone, one token at a time")
    batch_size: int = setting("batch_size").field()
    output_file: str | None = option(
        "write texts here, one a line; .jsonl: as with --json", metavar="FILE", group="output"
    )
    resume: bool = switch("continue an incomplete output file")
    json: bool = switch("print JSON objects with tokens and statistics")
    verbose: bool = switch("name the device; on a terminal, color tokens by origin", names="-v")
    score: bool = switch(
        'write log-probabilities for objects {"prompt": …, "target": …}', group="without generating"
    )
    embed: bool = switch("write a vector for each prompt, as JSON lines or into a .npy file")
    normalize: bool = switch("with --embed: scale vectors to length 1")

    @property
    def writes_text(self) -> bool:
        """Whether the output consists of texts, not of scores or vectors."""
        return not (self.score or self.embed)

    @property
    def texts_per_prompt(self) -> int:
        several = self.num_samples * self.settings.get("num_return_sequences", 1)
        return several if self.writes_text else 1

    @property
    def unit(self) -> str:
        """What becomes a piece, one of `SPLITS`."""
        several = self.num_samples > 1 or self.settings.get("num_return_sequences", 1) > 1
        return split_unit(self.split, self.target_language, several, self.file_type)

    @property
    def is_document(self) -> bool:
        """Whether the whole input file is one text."""
        cut = self.split != "none" and bool(self.split or self.file_type)
        return cut and not (self.input_file or ".jsonl").endswith(".jsonl")

    @property
    def is_output_whole(self) -> bool:
        """Whether the output file appears when it is complete, and not line by line."""
        path = Path(self.output_file or "")
        whole = not self.input_file or self.is_document or path.suffix == ".npy"
        return whole and (path.is_file() or not path.exists())  # not a pipe or a device

    @property
    def file_type(self) -> str:
        """The suffix of subtitles; "" for a plain text, which may begin with a prefix."""
        return suffix if (suffix := Path(self.input_file or "").suffix.lower()) in SUBTITLES else ""


def read_options(argv: Sequence[str] | None) -> MainOptions:
    """Parses and checks the command line, before anything is read or loaded.

    An output file named *.jsonl implies --json.
    """
    declared = arguments.options_of(MainOptions)
    parser = Parser(
        "generate",
        '--prompt "translate English to French: I have two cats."',
        "--model google/flan-t5-xl --input-file in.txt --output-file out.jsonl",
        description="Run a T5 model several tokens at a time: a small draft model proposes, the "
        "target model checks. Without options: the bundled pair translates a sentence.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    given = parser.given(declared, argv)
    input_file, output_file = given.get("input_file"), given.get("output_file") or ""
    suffix = Path(input_file or "").suffix.lower()
    array = {"output_file": "FILE.npy"} if output_file.endswith(".npy") else {}
    # The predictions of JSON lines need no draft.
    conflicts = CONFLICTS if (input_file or "").endswith(".jsonl") else (*CONFLICTS, WITHOUT_DRAFT)
    implied = {"split": "sentences"} if suffix in SUBTITLES else {}
    arguments.refuse(declared, implied | given | array, REQUIRES, conflicts)
    settings = {name: given.pop(name) for name in SETTINGS_OPTIONS if name in given}
    Settings(**settings)
    given["json"] = given.get("json", False) or output_file.endswith(".jsonl")
    options = MainOptions(settings=settings, **given)
    if sys.__stdout__ is None and not output_file:
        raise UserError("standard output is closed; name an --output-file")
    try:
        "x".encode(options.encoding or "utf-8")
    except (LookupError, UnicodeError):
        raise UserError(f"there is no encoding {options.encoding!r}; try cp1252, gb18030") from None
    if options.translation_prefix:
        checked_template(options.translation_prefix)
    if suffix in UNREADABLE and (options.target_language or options.split not in (None, "none")):
        raise UserError(f"{suffix} files cannot be split or translated; convert them to {READABLE}")
    if options.resume and options.is_output_whole:
        raise UserError("--resume cannot continue a document or an array; use JSON lines")
    pipe = input_file == "-" or Path(input_file or "").is_fifo()
    if options.resume and pipe and not options.json:  # a pipe's prompts may have changed
        raise UserError("--resume of a pipe requires an --output-file that ends in .jsonl")
    return options


def open_prompts(options: MainOptions) -> Lines:
    if not options.input_file:
        prompts = options.prompt or [DEFAULT_PROMPT]
        lines = read_prompts(prompts, options.unit == "none", blank=options.embed)
        return Lines(lines, len(lines))
    if options.is_document:
        text = read_document(options.input_file, options.file_type, options.encoding)
        return Lines([Line(text)], 1)
    if options.input_file == "-" and sys.stdin.isatty():
        log("type one line per prompt; Ctrl-D ends the input")
    second = "prediction" if options.writes_text and not options.regular_decode else ""
    reader = LineReader(options.input_file, options.score, second, options.embed, options.encoding)
    return reader.lines()


def read_command_line(argv: Sequence[str] | None) -> tuple[MainOptions, Lines]:
    options = read_options(argv)
    lines = open_prompts(options)
    if options.output_file:
        check_output_file(options.output_file, options.input_file, options.is_output_whole)
    return options, lines
