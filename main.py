"""Command line: prompts in, text and statistics out.

    python main.py                                         # the default prompt, the bundled pair
    python main.py --prompt "fix grammar: She have two cat."
    python main.py --model t5-11b --draft-model t5-small --input-file prompts.txt

Generated text goes to standard output and everything else to standard error. Exit status: 0 done,
2 bad input (one line `error: …`), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.generation_config import (
    Preset,
    combined,
    find_task,
    read_generation_config,
    read_tasks,
)
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, given_settings, log, run
from mlx_t5.cli.input import Lines, read_document, read_prompts
from mlx_t5.cli.options import check_ranks, cutting_of, read_options
from mlx_t5.cli.output import (
    ARRAY,
    LineFile,
    LineOf,
    Painter,
    check_output_file,
    embedding_object,
    error_of,
    score_object,
    text_lines,
)
from mlx_t5.cli.run_record import record_of
from mlx_t5.cli.runs import Compute, Run, lines_of, prefixed, unpaired
from mlx_t5.cli.streaming import bar, write_text
from mlx_t5.errors import UserError
from mlx_t5.machines.launched import (
    agreeing,
    join,
    leave_interrupts_to_rank_0,
    one_voice,
    to_compare,
)
from mlx_t5.settings import Settings

if TYPE_CHECKING:
    from typing import TypeGuard

    from decoder import SpeculativeDecoder
    from mlx_t5.cli.array_file import ArrayFile
    from mlx_t5.cli.models import Pair
    from mlx_t5.network.ranks import Ranks

DEFAULT_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit status.
    """
    return run(lambda: one_voice(lambda: read_options(argv), _main))


def _main(args: argparse.Namespace) -> int:
    ranks = join()
    check_ranks(args, ranks.size)
    leave_interrupts_to_rank_0(ranks)
    status = _run(args, ranks)
    # The launcher ends all ranks once one has failed; rank 0 may not have told everything by then.
    return 0 if ranks.rank and status == BAD_INPUT else status


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    with agreeing(ranks):
        prompts = _prompts(args, ranks)
        if args.output_file and prompts:
            check_output_file(args.output_file, args.input_file)
        chosen = _choose(args)
        presets = _presets(args, chosen.target)
        settings = _settings(args, presets)
    prefix = args.prefix
    if prefix is None:
        prefix = "".join(preset.prefix for preset in presets)
    if args.is_document:
        prompts = ranks.shared(prompts)
    if _is_streamed(prompts, args):
        decoder = _load(args, chosen, ranks)
        painter = _begin(decoder, settings, chosen, presets, args)
        args.output_file = os.devnull if args.output_file and ranks.rank else args.output_file
        record = record_of(args, prefix, chosen)
        return write_text(decoder, prompts[0], prefix, settings, painter, record, args)
    run = Run.of(prompts, args, ranks, prefix, chosen)
    if run.done.all:
        log(f"all {run.done.prompts} prompts are done" + ", some with an error" * run.done.failed)
        return run.record.finish(BAD_INPUT * run.done.failed)
    decoder = _load(args, chosen, ranks)
    if args.resume:
        run.log_resumed()
    painter = _begin(decoder, settings, chosen, presets, args)
    compute = _computation(decoder, prefix, settings, args)
    return _write_all(run, compute, _output(run, painter, args), args)


def _is_streamed(prompts: Any, args: argparse.Namespace) -> TypeGuard[list[str]]:
    """Whether a single text is to be written while it is generated, piece by piece if split."""
    if not isinstance(prompts, list) or len(prompts) > 1 or args.json or args.score or args.embed:
        return False
    whole = args.num_samples == args.num_beams == 1 and not args.output_file
    return whole or args.split != "none"


def _prompts(args: argparse.Namespace, ranks: Ranks) -> list[str] | Lines | None:
    """The prompts; None where rank 0 reads them for all."""
    if args.input_file:
        if ranks.rank:
            return None
        if args.is_document:
            return [read_document(args.input_file, args.file_type)]
        return lines_of(args)
    return read_prompts(args.prompt or [DEFAULT_PROMPT])


def _choose(args: argparse.Namespace) -> Pair:
    # Not before: `--help` and a mistake in an option need not wait for MLX.
    from convert import convert
    from mlx_t5.cli import models

    scoring = args.score or args.embed
    why = "no draft takes part" if scoring else "regular decoding"
    regular = args.regular_decode or scoring
    names = args.model, args.draft_model
    fetch = not (args.num_beams or 1) > 1  # beams do without a draft: it is not worth a download
    return models.choose_pair(*names, convert, regular, args.adapter_path, why, fetch)


def _presets(args: argparse.Namespace, folder: Path) -> list[Preset]:
    """What the model's own files set; a later one overrides an earlier."""
    presets = [] if args.ignore_generation_config else [read_generation_config(folder)]
    return presets if args.task is None else [*presets, find_task(read_tasks(folder), args.task)]


def _settings(args: argparse.Namespace, presets: list[Preset]) -> Settings:
    """What the options set, and otherwise the model's own files; `args` has all of it then."""
    sources = [preset.settings for preset in presets]
    settings = Settings(**combined(*sources, given_settings(args)))
    vars(args).update(vars(settings))
    if args.num_samples > 1 and settings.temp == 0:
        raise UserError("--num-samples: greedy samples would be equal; set --temp above 0")
    return settings


def _load(args: argparse.Namespace, chosen: Pair, ranks: Ranks) -> SpeculativeDecoder:
    """The models, which are the same on all ranks."""
    from decoder import SpeculativeDecoder
    from mlx_t5.cli import models
    from mlx_t5.network.interface import require_decoder
    from model import load

    with agreeing(ranks) as facts:
        target, drafter, tokenizer, other = models.load_pair(chosen, args.dtype, load, ranks.group)
        if not args.embed:
            require_decoder(target)
        num_draft = args.num_draft if args.exact else Settings.num_draft  # it sets the width
        decoder = SpeculativeDecoder(
            target, drafter, tokenizer, num_draft, draft_tokenizer=other, exact=args.exact
        )
        facts |= to_compare(decoder, vars(args))
    return decoder


def _begin(
    decoder: SpeculativeDecoder,
    settings: Settings,
    chosen: Pair,
    presets: list[Preset],
    args: argparse.Namespace,
) -> Painter | None:
    """Tells what is run. An error before is the only line on standard error.

    Returns:
        What colours the texts of --verbose.
    """
    from mlx_t5.backend import device_name

    if args.exact:
        decoder.engine(settings, args.batch_size)  # which may refuse
    texts = not (args.score or args.embed)
    painter = Painter(decoder.tokenizer) if args.verbose and texts else None
    notes = [chosen.note, f"on {device_name()}" if args.verbose else ""]
    notes += [preset.note for preset in presets if texts]
    notes += [] if args.prompt or args.input_file else [f"prompt: {DEFAULT_PROMPT}"]
    notes += [painter.legend] if painter else []
    for note in filter(None, notes):
        log(note)
    return painter


def _computation(
    decoder: SpeculativeDecoder, prefix: str, settings: Settings, args: argparse.Namespace
) -> Compute:
    """What makes texts, scores or vectors of prompts."""
    cutting = cutting_of(args, prefix)

    def compute(prompts: Iterator[Any], indexes: Iterator[int], ready: Any) -> Iterator[Any]:
        prompts = prompts if cutting else prefixed(prompts, prefix)
        if args.score:
            return decoder.scoring.scores(prompts, args.batch_size, ready)
        if args.embed:
            return decoder.embeddings.vectors(prompts, args.normalize, args.batch_size, ready)
        prompts, predictions = unpaired(prompts)
        return decoder.results(
            prompts,
            args.seed,
            args.batch_size,
            args.num_samples,
            ready,
            indexes,
            predictions,
            **vars(settings),
            **cutting,
        )

    return compute


def _output(run: Run, painter: Painter | None, args: argparse.Namespace) -> LineFile | ArrayFile:
    """Where results go, and what a line of them looks like."""
    if args.embed and (run.output_file or "").endswith(ARRAY):
        from mlx_t5.cli.array_file import ArrayFile

        return ArrayFile(str(run.output_file))
    if args.score:
        line_of: LineOf = score_object
    elif args.embed:
        line_of = embedding_object
    else:
        line_of = text_lines(args.json, bool(run.output_file) or args.json, painter)
    return LineFile(run.output_file, run.keep, run.record, line_of)


def _write_all(
    run: Run, compute: Compute, output: LineFile | ArrayFile, args: argparse.Namespace
) -> int:
    """Write what becomes of every prompt, in order, as soon as it and all before it are done."""
    from mlx_t5.backend import mx
    from mlx_t5.cli.totals import Totals

    began, totals, status = time.perf_counter(), Totals(), BAD_INPUT * run.failed
    each = run.outcomes_a_prompt
    unit = "prompts" if each == 1 else "texts"
    mx.reset_peak_memory()
    total, done = run.count and run.count * each, run.first * each
    with output, bar(total, done, unit, args) as shown:
        try:
            for n, prompt, outcome in run.outcomes(compute):
                output.write(prompt, outcome, n)
                if error := error_of(outcome):
                    status = BAD_INPUT
                    where = "" if isinstance(prompt, UserError) else f"prompt {n}: "
                    log(f"error: {where}{error}")
                totals.add(outcome)
                shown.update()
        except KeyboardInterrupt:
            status = INTERRUPTED
    totals.stats.peak_memory_bytes = mx.get_peak_memory()
    interrupted = ""
    if status == INTERRUPTED:
        of_all = f" of {total}" if total else ""
        interrupted = f"interrupted: {totals.results}{of_all} {unit} done · "
    texts = not (args.score or args.embed)
    log(interrupted + totals.summary(time.perf_counter() - began, unit, texts, args.verbose))
    return run.record.finish(status)


if __name__ == "__main__":
    sys.exit(main())
