"""Writes one text step by step, or one document piece by piece, while it is generated."""

from __future__ import annotations

import contextlib
import sys
import time

from tqdm import tqdm

from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, log, resuming_command
from mlx_t5.cli.generate_options import MainOptions
from mlx_t5.cli.input import Line
from mlx_t5.cli.output import LineFile, TokenHighlighter, error_of, summary
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.document_results import DocumentStats
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.errors import UserError


def write_text(
    decoder: SpeculativeDecoder,
    line: Line,
    request: GenerationRequest,
    options: MainOptions,
    highlighter: TokenHighlighter | None,
) -> int:
    """Writes one text, or one document piece by piece, and returns the exit status."""
    status, chunk, text, began, count = 0, None, "", time.perf_counter(), 0
    split = request.document.split != "none"
    if split:
        from mlx_t5.text.documents import Document  # slow to import, and few texts are documents

        prefixes = decoder.model.config.task_prefixes
        document = Document(line.text, request.document, lambda text: 0, prefixes=prefixes)
        count = sum(1 for _ in document.cut())
    stream = decoder.chunks(line, request, options.batch_size)
    path = options.output_file
    output = LineFile(path, whole=bool(path and options.is_output_whole))
    try:
        with (
            contextlib.closing(stream) as parts,
            output,
            progress_bar(count, 0, "pieces", options) as bar,
        ):
            for chunk in parts:
                text = chunk.text
                if chunk.result and chunk.result.error and not chunk.result.pieces:
                    raise UserError(chunk.result.error)  # the document could not be cut
                if highlighter and not options.output_file:
                    rest = text[sum(map(len, chunk.segments)) :]
                    text = highlighter.highlight(chunk.segments, chunk.origins, rest)
                output.write_text(text)
                bar.update(1 if split and chunk.origins else 0)
    except KeyboardInterrupt:
        status = INTERRUPTED
    file = split and options.input_file  # kept to the byte, but for a terminal
    if not (file and (options.output_file or not sys.stdout.isatty())):
        print(flush=True)
    if chunk:
        if chunk.result and (error := error_of(chunk.result)):
            status = status or BAD_INPUT
            log(f"error: {error}")
        seconds = time.perf_counter() - began if split else chunk.stats.decode_seconds
        interrupted = "interrupted: " if status == INTERRUPTED else ""
        cut_off = 0
        if isinstance(chunk.stats, DocumentStats):
            cut_off = chunk.stats.length
        elif chunk.result and chunk.result.finish_reason == "length":
            cut_off = 1
        log(options.place + interrupted + summary(chunk.stats, 1, seconds, cut_off=cut_off))
    if status == INTERRUPTED and options.place:
        log(f"go on with: {resuming_command('generate', options.argv)}")
    return status


def progress_bar(total: int | None, done: int, unit: str, options: MainOptions) -> tqdm:
    # In a terminal a bar would mix with the texts; without a terminal tqdm shows none.
    hidden = True if options.verbose or (not options.output_file and sys.stdout.isatty()) else None
    leave = not options.place  # one line a file is enough
    return tqdm(total=total, initial=done, unit=f" {unit}", disable=hidden, leave=leave)
