"""One text, written while it is generated: a prompt's step by step, a document's piece by piece."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from mlx_t5.cli import documents
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED
from mlx_t5.cli.output import LineFile, Painter, error_of
from mlx_t5.cli.run_record import RunRecord
from mlx_t5.cli.totals import Totals
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

    from mlx_t5.settings import Settings
    from mlx_t5.text.documents import Cutting


def write_text(
    decoder: Any,
    prompt: str,
    prefix: str,
    cutting: Cutting,
    settings: Settings,
    painter: Painter | None,
    args: argparse.Namespace,
) -> int:
    """Writes one text to standard output, or a document to the output file, to the byte.

    Returns:
        The exit status.
    """
    status, chunk, text, began = 0, None, "", time.perf_counter()
    split = cutting.split != "none"
    if split:
        stream = documents.chunks(decoder, cutting, [prompt], settings, args)
    else:
        options = {"seed": args.seed, "batch_size": args.batch_size, **vars(settings)}
        stream = decoder.stream(prefix + prompt, **options)
    count = documents.count_pieces(prompt, cutting, args) if split else 0
    output = LineFile(args.output_file, record=RunRecord(args.output_file or ""), end="")
    with contextlib.closing(stream) as chunks, output, bar(count, 0, "pieces", args) as shown:
        try:
            for chunk in chunks:
                text = chunk.text
                if painter and not args.output_file:
                    chunk = documents.spelled(chunk, decoder) if split else chunk
                    rest = text[sum(map(len, chunk.pieces)) :]
                    text = painter.paint(chunk.pieces, chunk.writers, rest)
                output.write_line(text)
                shown.update(bool(split and chunk.writers))
        except KeyboardInterrupt:
            status = INTERRUPTED
    if not (split and (args.output_file or not sys.stdout.isatty())):
        print(flush=True)
    if chunk:
        if chunk.result and (error := error_of(chunk.result)):
            if not chunk.result.pieces:
                raise UserError(error)  # it could not be cut
            status = status or BAD_INPUT
            log(f"error: {error}")
        totals = Totals()
        totals.add(chunk)
        seconds = time.perf_counter() - began if split else chunk.stats.decode_seconds
        log(("interrupted: " if status == INTERRUPTED else "") + totals.summary(seconds))
    return status


def bar(total: int | None, done: int, unit: str, args: argparse.Namespace) -> tqdm:
    """Shows how much is finished, on standard error."""
    from tqdm import tqdm

    # In a terminal a bar would run through the texts; tqdm knows where there is none to show it in.
    hidden = True if args.verbose or (not args.output_file and sys.stdout.isatty()) else None
    return tqdm(total=total, initial=done, unit=f" {unit}", disable=hidden)


def log(line: str) -> None:
    """Tells something on standard error."""
    print(line, file=sys.stderr, flush=True)
