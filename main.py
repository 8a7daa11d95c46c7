"""Command line: prompts in, text and statistics out.

    python main.py                                         # the default prompt, the bundled pair
    python main.py --prompt "fix grammar: She have two cat."
    python main.py --model t5-11b --draft-model t5-small --input-file prompts.txt

Generated text goes to standard output and everything else to standard error. Exit status: 0 done,
2 bad input (one line `error: …`), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.generation_config import (
    Preset,
    combined,
    find_task,
    read_generation_config,
    read_tasks,
)
from mlx_t5.cli import work
from mlx_t5.cli.arguments import BAD_INPUT, INTERRUPTED, given_settings, not_given, run
from mlx_t5.cli.input import Lines, read_prompts
from mlx_t5.cli.options import EARLY_STOPPING, build_parser, check_options
from mlx_t5.cli.output import Painter, Results, Totals, check_output_file
from mlx_t5.cli.run_record import RunRecord
from mlx_t5.errors import UserError
from mlx_t5.machines import team
from mlx_t5.requests import Settings
from mlx_t5.text.detokenizer import StreamingDetokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

    from decoder import SpeculativeDecoder
    from mlx_t5.cli.models import Pair
    from mlx_t5.cli.work import Job
    from mlx_t5.machines.launched import Rank
    from mlx_t5.machines.team import Team
    from mlx_t5.requests import Result

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
    return run(lambda: _main(team.parsed(build_parser(), argv, not_given())))


def _main(args: argparse.Namespace) -> int:
    rank, ranks = work.rank_of(args), work.team_of(args)
    if ranks and ranks.rank:
        return ranks.follow(lambda: _follower(args, ranks))
    with work.silent(rank):
        return _run(args, rank, ranks)


def _run(args: argparse.Namespace, rank: Rank | None, ranks: Team | None) -> int:
    args.early_stopping = EARLY_STOPPING.get(args.early_stopping)
    given = given_settings(args)
    Settings(**given)  # mistakes in options are told first
    check_options(args)
    prompts = _prompts(args) if rank is None or rank.leads else []
    if args.output_file and prompts:
        check_output_file(args.output_file, args.input_file)
    chosen = _choose(args)
    presets = _presets(args, chosen.target)
    settings = Settings(**combined(*(preset.settings for preset in presets), given))
    vars(args).update(vars(settings))
    if args.num_samples > 1 and settings.temp == 0:
        raise UserError("--num-samples: greedy samples would be equal; set --temp above 0")
    prefix = "".join(preset.prefix for preset in presets)
    record = RunRecord()
    if prompts:
        from mlx_t5.cli.job_facts import record_of

        record = record_of(args, settings, prefix, chosen, work.is_json(args))
    with work.Job.of(prompts, rank, args, _tell) as job:
        job.record, job.failed = record, record.failed_of(job.first) or job.failed
        if job.done:
            return _nothing_left(job)
        if job.first and not record.found:
            _tell(f"warning: there is no {record.path}, so nothing says what made the output")
        decoder = _load(args, chosen, settings, ranks)
        generates = not (args.score or args.embed)
        for note in filter(None, (preset.note for preset in presets if generates)):
            _tell(note)
        if not (args.prompt or args.input_file):
            _tell(f"prompt: {DEFAULT_PROMPT}")
        return _decode(decoder, job, prefix, settings, args)


def _nothing_left(job: Job) -> int:
    _tell(f"all {job.first} prompts are done" + (", some with an error" if job.failed else ""))
    return job.record.finish(BAD_INPUT if job.failed else 0)


def _decode(
    decoder: SpeculativeDecoder, job: Job, prefix: str, settings: Settings, args: Any
) -> int:
    job.begin(lambda: _agreed(decoder, prefix, settings, args))
    if args.score or args.embed:
        return _one_pass(decoder, job, prefix, args)
    painter = Painter(bool(os.environ.get("NO_COLOR"))) if args.verbose else None
    if painter:
        _tell(painter.legend)
    to_screen = not (args.output_file or args.json)
    single = args.num_samples == args.num_beams == 1
    prompts = job.prompts
    if to_screen and single and isinstance(prompts, list) and len(prompts) == 1:
        return _stream(decoder, prefix + prompts[0], settings, painter, args)
    return _write_all(decoder, job, prefix, settings, painter, args)


def _prompts(args: argparse.Namespace) -> list[str] | Lines:
    if args.input_file:
        return Lines(args.input_file, targets=args.score)
    return read_prompts(args.prompt or [DEFAULT_PROMPT])


def _choose(args: argparse.Namespace) -> Pair:
    # Not before: `--help` and a mistake in an option need not wait for MLX.
    from convert import convert
    from mlx_t5.cli import models

    alone = args.score or args.embed
    why = "no draft takes part" if alone else "regular decoding"
    regular = args.regular_decode or alone
    wanted = args.model, args.draft_model
    drafts = not (args.num_beams or 1) > 1  # beams do without: then it is not worth a download
    return models.choose_pair(*wanted, convert, regular, args.adapter_path, why, drafts)


def _presets(args: argparse.Namespace, folder: Path) -> list[Preset]:
    """What the model's own files want, the stronger wish last."""
    presets = [] if args.ignore_generation_config else [read_generation_config(folder)]
    return presets if args.task is None else [*presets, find_task(read_tasks(folder), args.task)]


def _follower(args: argparse.Namespace, ranks: Team) -> Callable[..., None]:
    """What another rank than 0 does: it computes its part of the target."""
    from mlx_t5.machines.leader import Follower
    from model import load

    chosen = _choose(args)
    return Follower(load(chosen.target, args.dtype, chosen.adapter, group=ranks.group)[0]).do


def _load(
    args: argparse.Namespace, chosen: Pair, settings: Settings, ranks: Team | None
) -> SpeculativeDecoder:
    from decoder import SpeculativeDecoder
    from mlx_t5.backend import device_name
    from mlx_t5.cli import models
    from mlx_t5.machines.leader import leading
    from mlx_t5.network.interface import require_decoder
    from model import load

    target, drafter, tokenizer, other = models.load_pair(chosen, args.dtype, load, leading(ranks))
    if not args.embed:
        require_decoder(target)
    num_draft = settings.num_draft if args.exact else Settings.num_draft  # it sets the width
    decoder = SpeculativeDecoder(
        target, drafter, tokenizer, num_draft, draft_tokenizer=other, exact=args.exact
    )
    if args.exact:
        decoder.engine(settings, args.batch_size)  # what it refuses is the only line
    _tell(chosen.note)  # only now: an error is to be the only line on standard error
    if args.verbose:
        _tell(f"on {device_name()}")
    return decoder


def _stream(
    decoder: SpeculativeDecoder,
    prompt: str,
    settings: Settings,
    painter: Painter | None,
    args: argparse.Namespace,
) -> int:
    """Show one text while it is generated."""
    status, stats = 0, None
    stream = decoder.stream(prompt, seed=args.seed, batch_size=args.batch_size, **vars(settings))
    with contextlib.closing(stream) as chunks:
        try:
            for chunk in chunks:
                stats, text = chunk.stats, chunk.text
                if painter:
                    rest = text[sum(map(len, chunk.pieces)) :]
                    text = painter.paint(chunk.pieces, chunk.writers, rest)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            status = INTERRUPTED
    print(flush=True)
    if stats:
        done = "interrupted: " if status else ""
        totals = Totals()
        totals.add(stats)
        _tell(done + totals.summary(stats.decode_seconds))
    return status


def _write_all(
    decoder: SpeculativeDecoder,
    job: Job,
    prefix: str,
    settings: Settings,
    painter: Painter | None,
    args: argparse.Namespace,
) -> int:
    """Write every text, in order, as soon as it and all before it are finished."""

    def results(prompts: Iterator[Any], indexes: Iterator[int], ready: Any) -> Iterator[Result]:
        return decoder.results(
            work.prefixed(prompts, prefix),
            batch_size=args.batch_size,
            num_samples=args.num_samples,
            seed=args.seed,
            ready=ready,
            indexes=indexes,
            **vars(settings),
        )

    def paint(result: Result) -> str:
        assert painter is not None, "it is only called with --verbose"
        return painter.line(result, StreamingDetokenizer(decoder.tokenizer))

    texts = _texts_a_prompt(args)
    unit = "prompts" if texts == 1 else "texts"
    began, totals, status = time.perf_counter(), Totals(), BAD_INPUT * job.failed
    in_hand: work.InHand = deque()
    as_json = work.is_json(args)
    with (
        Results(
            args.output_file, as_json, paint if painter else None, job.keep, job.record
        ) as output,
        _bar(job, unit, args) as bar,
    ):
        try:
            for result in job.outcomes(results, in_hand):
                status = max(status, _write(output, *in_hand[0], result))
                totals.add(result.stats)
                if totals.results % texts == 0:
                    in_hand.popleft()
                bar.update()
        except KeyboardInterrupt:
            status = INTERRUPTED
    of_all = f" of {bar.total}" if bar.total else ""
    done = f"interrupted: {totals.results}{of_all} {unit} done · " if status == INTERRUPTED else ""
    _tell(done + totals.summary(time.perf_counter() - began, unit))
    job.report(args.verbose)
    return job.record.finish(status)


def _one_pass(decoder: SpeculativeDecoder, job: Job, prefix: str, args: Any) -> int:
    """Writes scores or vectors, in order, batch by batch."""
    from mlx_t5.backend import mx
    from mlx_t5.cli import one_pass

    def outcomes(prompts: Iterator[Any], _: Iterator[int], ready: Any) -> Iterator[Any]:
        prompts = work.prefixed(prompts, prefix)
        if args.score:
            return decoder.scores(prompts, args.batch_size, ready)
        return decoder.embeddings(prompts, args.normalize, args.batch_size, ready)

    in_hand: work.InHand = deque()
    output: one_pass.JsonLines | one_pass.ArrayFile
    if args.score:
        output = one_pass.JsonLines(args.output_file, one_pass.score_record, job.keep, job.record)
    else:
        output = one_pass.output_of_vectors(args.output_file, job.keep, job.record)
    began, done, status = time.perf_counter(), 0, BAD_INPUT * job.failed
    mx.reset_peak_memory()
    with output, _bar(job, "prompts", args) as bar:
        try:
            for outcome in job.outcomes(outcomes, in_hand):
                n, item = in_hand.popleft()
                output.write(item, outcome)
                if error := one_pass.error_of(outcome):
                    status = BAD_INPUT
                    _tell(
                        "error: " + ("" if isinstance(item, UserError) else f"prompt {n}: ") + error
                    )
                done += 1
                bar.update()
        except KeyboardInterrupt:
            status = INTERRUPTED
    interrupted = "interrupted: " if status == INTERRUPTED else ""
    seconds = time.perf_counter() - began
    _tell(interrupted + one_pass.summary(done, seconds, mx.get_peak_memory()))
    job.report(args.verbose)
    return job.record.finish(status)


def _bar(job: Job, unit: str, args: argparse.Namespace) -> tqdm:
    """Shows how many texts are finished, on standard error."""
    from tqdm import tqdm

    texts = _texts_a_prompt(args)
    # In a terminal a bar would run through the texts; tqdm knows where there is none to show it in.
    hidden = True if args.verbose or (not args.output_file and sys.stdout.isatty()) else None
    total, done = job.count and job.count * texts, job.first * texts
    return tqdm(total=total, initial=done, unit=" " + unit, disable=hidden)


def _texts_a_prompt(args: argparse.Namespace) -> int:
    return args.num_samples * args.num_return_sequences  # one of them is 1


def _agreed(
    decoder: SpeculativeDecoder, prefix: str, settings: Settings, args: argparse.Namespace
) -> dict[str, str]:
    """What ranks that share a file have to have in common."""
    from mlx_t5.machines.outcomes import common

    names = ("seed", "num_samples", "batch_size", "score", "embed", "normalize", "exact")
    asked = [prefix, vars(settings), {name: getattr(args, name) for name in names}]
    return common(decoder, asked)


def _write(output: Results, n: int, prompt: str | UserError, result: Result) -> int:
    """Write one result, and its error if it has one; returns the exit status that it asks for."""
    unread = isinstance(prompt, UserError)
    output.write(prompt if isinstance(prompt, str) else "", result, n)
    if not result.error:
        return 0
    _tell("error: " + ("" if unread else f"prompt {n}: ") + result.error)
    return BAD_INPUT


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
