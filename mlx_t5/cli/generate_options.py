"""The options of `mlx_t5.generate` (main.py), and which of them fit together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mlx_t5 import __version__
from mlx_t5.cli import arguments, input
from mlx_t5.cli.arguments import Option, Parser, at_least, log, option, setting, switch
from mlx_t5.cli.input_files import paired_files
from mlx_t5.cli.output import ARRAY, check_output_file
from mlx_t5.cli.resuming import refuse_interrupted
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
    "repetition_detection": Option(
        "end a text that repeats a pattern of at most so many tokens so often (default: 0, off; "
        "16,4 with --target-language)",
        kind=arguments.repetition,
        metavar="MAX_PATTERN_SIZE[,MIN_COUNT]",
    ),
}
OUTPUT_ARRAY = "--output-file FILE.npy"
OTHER_ARRAYS = (".csv", ".tsv", ".npz", ".parquet", ".pt", ".safetensors")  # not written
IF_BLANK = "fill it, or give --split sentences or --split lines to decode the file as one text"
REQUIRES = (
    ("--task", "--prompt", "--input-file"),
    ("--score", "--input-file"),
    ("--normalize", "--embed"),
    (OUTPUT_ARRAY, "--embed"),
    ("--source-language", "--split", "--target-language"),
    ("--max-source-tokens", "--split", "--target-language"),
    ("--target-language", "--prompt", "--input-file"),
    ("--translation-prefix", "--target-language"),
    ("--encoding", "--input-file"),
    ("--resume", "--input-file"),
    ("--resume", "--output-file"),
    ("--overwrite", "--output-file"),
)
CONFLICTS = (
    ("--prompt", "--input-file"),
    ("--resume", "--overwrite"),
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
        'one prompt a line; .jsonl: objects {"prompt": …}; -: standard input; several files, or a '
        "folder of them, need a folder as --output-file",
        metavar="FILE",
        several=True,
        repeated=True,
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
    resume: bool = switch("continue an incomplete output file, or a folder with some")
    overwrite: bool = switch("replace the output even if it is that of an interrupted run")
    json: bool = switch("print JSON objects with tokens and statistics")
    verbose: bool = switch("name the device; on a terminal, color tokens by origin", names="-v")
    score: bool = switch(
        'write log-probabilities for objects {"prompt": …, "target": …}', group="without generating"
    )
    embed: bool = switch("write a vector for each prompt, as JSON lines or into a .npy file")
    normalize: bool = switch("with --embed: scale vectors to length 1")
    # What is not an option, but follows from them.
    writes_text: bool = True  # or else scores or vectors
    file_type: str = ""  # the suffix of subtitles; other files may begin with a prefix
    place: str = ""  # "2 of 20: NAME: " of a file among several
    argv: Sequence[str] = ()  # the command line

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
    def is_resumable(self) -> bool:
        """Whether --resume can continue the output file."""
        pipe = self.input_file == "-" or Path(self.input_file or "").is_fifo()
        # A pipe's prompts may have changed; JSON lines have them.
        return bool(self.input_file) and not self.is_output_whole and (self.json or not pipe)

    @cached_property
    def lines(self) -> input.Lines:
        """The prompts; the first use opens the input, and raises `UserError` if that is bad."""
        if not self.input_file:
            if not self.prompt:
                return input.Lines(_piped_or_demo(self), 1)
            lines = input.read_prompts(self.prompt, self.unit == "none", blank=self.embed)
            return input.Lines(lines, len(lines))
        if self.is_document:
            text = input.read_document(self.input_file, self.file_type, self.encoding)
            return input.Lines([input.Line(text)], 1)
        if self.input_file == "-" and sys.stdin.isatty():
            log("type one line per prompt; Ctrl-D ends the input")
        translates = bool(self.target_language)  # then an empty line has an empty translation
        return input.LineReader(
            self.input_file,
            targets=self.score,
            optional="prediction" if self.writes_text and not self.regular_decode else "",
            blank=self.embed or translates,
            trailing=translates,
            encoding=self.encoding,
            if_blank=IF_BLANK,
        ).lines()


def _piped_or_demo(options: MainOptions) -> Iterator[input.Line]:
    """The prompt that waits on standard input once the models are loaded, or the default one."""
    if input.is_piped():
        yield from input.read_prompts(["-"], options.unit == "none", blank=options.embed)
        return
    if options.task or options.target_language:
        raise UserError("--task and --target-language require --prompt or --input-file")
    log(f"prompt: {DEFAULT_PROMPT}")
    yield input.Line(DEFAULT_PROMPT)


def read_options(argv: Sequence[str]) -> list[MainOptions]:
    """Parses and checks the command line, before anything is read or loaded.

    An output file named *.jsonl implies --json. There is an element for each input file.
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
    given["argv"] = argv
    given["writes_text"] = not (given.get("score") or given.get("embed"))
    inputs, output = given.pop("input_file", []), given.get("output_file")
    pairs: Sequence[tuple[str | None, str | None]] = [(inputs[0] if inputs else None, output)]
    several = len(inputs) > 1 or any(map(os.path.isdir, inputs))
    if several:
        as_json = any(given.get(name) for name in ("json", "score", "embed"))
        pairs = paired_files(inputs, output or "", as_json)
    options = []
    for number, (file, result) in enumerate(pairs, 1):
        place = f"{number} of {len(pairs)}: {file}: " if several else ""
        of_file = {"input_file": file, "output_file": result, "place": place}
        options.append(_checked_options(declared, given | of_file))
    return options


def _checked_options(declared: Mapping[str, Option], given: dict[str, Any]) -> MainOptions:
    """The options for one input file, or for prompts."""
    input_file, output_file = given["input_file"], given.get("output_file") or ""
    suffix, kind = (Path(name or "").suffix.lower() for name in (input_file, output_file))
    checked = {name: value for name, value in given.items() if name in declared}
    if suffix in SUBTITLES:
        given["file_type"] = suffix
        checked.setdefault("split", "sentences")
    if not (input_file or given.get("prompt")) and input.may_be_piped():
        checked["prompt"] = ["-"]
    if kind == ARRAY:
        checked["output_file"] = "FILE.npy"
    # The predictions of JSON lines need no draft.
    conflicts = CONFLICTS if suffix == ".jsonl" else (*CONFLICTS, WITHOUT_DRAFT)
    arguments.refuse(declared, checked, REQUIRES, conflicts)
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
    if kind in SUBTITLES and (kind != suffix or options.json or not options.writes_text):
        cure = "end it as the input does, or in .txt or .jsonl"
        raise UserError(f"{output_file} would not hold {kind[1:]} subtitles; {cure}")
    if options.embed and kind in OTHER_ARRAYS:
        raise UserError(f"vectors are not written as {kind}; name the file .npy or .jsonl")
    if options.resume and not options.place and not options.is_resumable:
        if options.is_output_whole:
            what, cure = "a document", "without it the document starts again"
            if options.embed:
                what, cure = "an array", "name a .jsonl file"
            raise UserError(f"--resume cannot continue {what}; {cure}")
        raise UserError("--resume of a pipe requires an --output-file that ends in .jsonl")
    return options


def read_command_line(argv: Sequence[str] | None) -> list[MainOptions]:
    """The options for each input file; a single input has been opened, and is known to be good."""
    inputs = read_options(sys.argv[1:] if argv is None else argv)
    for options in inputs:
        lines = None if options.place else options.lines
        output = options.output_file
        if output and (lines or Path(output).parent.is_dir()):
            check_output_file(output, options.input_file, options.is_output_whole)
    if inputs[0].output_file:
        refuse_interrupted(inputs)
    return inputs


main = partial(arguments.run_command, "generate", read_command_line, "interrupted")
