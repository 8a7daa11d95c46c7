"""The options of documents: texts that are split, decoded piece by piece and joined again.

A file that is no JSON lines is one document then, and so is each prompt and each line of JSON.
Nothing here imports MLX before it is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import at_least, option_of
from mlx_t5.cli.input import read_document
from mlx_t5.errors import UserError
from mlx_t5.settings import SPLITS, Settings

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Chunk
    from mlx_t5.text.documents import Cutting


def add_documents(group: argparse._ActionsContainer) -> None:
    """Adds the options that say how a text is cut."""
    group.add_argument(
        "--split",
        choices=SPLITS,
        default="none",
        help="decode a text sentence by sentence, or line by line, and join the answers as the "
        "text was; an --input-file that is no .jsonl is one document then (default: none)",
    )
    group.add_argument(
        "--prefix",
        metavar="TEXT",
        help="put this before every prompt, or every piece of a document, in place of the prefix "
        "of --task (default: of a document, what it begins with, as in “translate English to "
        "German: …”)",
    )
    group.add_argument(
        "--source-language",
        metavar="CODE",
        default="",
        help="whose rules end a sentence, such as de (default: the language that the prefix "
        "translates from, or en)",
    )
    group.add_argument(
        "--max-source-tokens",
        type=at_least(1),
        metavar="N",
        help="cut sentences that would be longer, prefix included, at a comma or between words "
        "(default: n_positions of the model's config.json, if it has that)",
    )


def is_one_document(args: argparse.Namespace) -> bool:
    """Whether the input file is one document as a whole."""
    lines = (args.input_file or ".jsonl").endswith(".jsonl")
    return args.split != "none" and not lines


def read(args: argparse.Namespace) -> str:
    """The input file, which is one document.

    Raises:
        UserError: it cannot be read, or is not what its name says.
    """
    text = read_document(args.input_file)
    _spans(text, args)
    return text


def check_documents(args: argparse.Namespace) -> None:
    """Refuses what does not go with a split, or needs one.

    Raises:
        UserError: the options ask for it.
    """
    if args.split == "none":
        for name in ("source_language", "max_source_tokens"):
            if vars(args)[name]:
                raise UserError(f"{option_of(name)} is for documents; give --split as well")
        return
    if args.score or args.embed:
        raise UserError("--split is for texts that are written; leave it out")
    if args.num_samples > 1 or (args.num_return_sequences or 1) > 1:
        name = "--num-samples" if args.num_samples > 1 else "--num-return-sequences"
        raise UserError(f"--split joins one text a document; leave {name} out")
    if is_one_document(args):
        for name, given in (("--resume", args.resume), ("--parallel data", args.parallel)):
            if given:
                cure = f"leave {name} out, or give documents as JSON lines"
                raise UserError(f"{name} is for lines, and with --split a file is one; {cure}")


def cutting_of(args: argparse.Namespace, prefix: str) -> Cutting:
    """How the options have texts cut; a prefix of "" that nobody gave is looked for in them."""
    from mlx_t5.text.documents import Cutting

    given = None if args.split == "none" or (not prefix and args.prefix is None) else prefix
    return Cutting(args.split, given, args.source_language, args.max_source_tokens)


def chunks(
    decoder: Any,
    cutting: Cutting,
    prompts: Iterable[Any],
    settings: Settings,
    args: argparse.Namespace,
    **call: Any,
) -> Generator[Chunk, None, None]:
    """Decodes what a command line has, as `engine.documents.chunks` does."""
    from mlx_t5.engine import documents

    def texts() -> Iterator[Any]:
        for prompt in prompts:
            text, prediction = prompt if isinstance(prompt, tuple) else (prompt, None)
            if prediction is not None:
                text = UserError("a prediction is of a whole text; leave it out, or do not split")
            elif is_one_document(args):
                text = documents.document_of(text, cutting, decoder, _spans(text, args))
            yield text

    call |= {"batch_size": args.batch_size, **vars(settings)}
    return documents.chunks(decoder, cutting, texts(), args.seed, **call)


def spelled(chunk: Chunk, decoder: Any) -> Chunk:
    """A piece's chunk, with the text that each of its tokens completed."""
    from mlx_t5.engine import documents

    return documents.spelled(chunk, decoder.tokenizer)


def count_pieces(text: str, cutting: Cutting, args: argparse.Namespace) -> int:
    """How many pieces a document has, unless some are too long."""
    from mlx_t5.text.documents import Document

    spans = _spans(text, args) if is_one_document(args) else None
    return sum(1 for _ in Document(text, cutting, lambda prompt: 0, spans=spans).cut())


def _spans(text: str, args: argparse.Namespace) -> Any:
    """What of a file may be decoded; None for plain text, which may begin with a prefix."""
    from mlx_t5.text.markup import SUFFIXES, spans

    suffix = Path(args.input_file).suffix.lower()
    return spans(text, suffix) if suffix in SUFFIXES and suffix != ".txt" else None
