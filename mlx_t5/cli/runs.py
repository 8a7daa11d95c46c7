"""The prompts of a command line: all of them, those that ranks share, or those of one rank."""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, replace
from itertools import chain, count, tee
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import log
from mlx_t5.cli.input import Lines
from mlx_t5.cli.output import ARRAY, LineFile
from mlx_t5.cli.resume import Form, ResumePoint, find_resume_point
from mlx_t5.cli.run_record import RunRecord, record_of
from mlx_t5.machines.launched import agreeing

if TYPE_CHECKING:
    from mlx_t5.cli.array_file import ArrayFile
    from mlx_t5.cli.models import Pair
    from mlx_t5.cli.totals import Totals
    from mlx_t5.machines.parts import Part
    from mlx_t5.network.ranks import Ranks

# Makes outcomes of prompts, their indexes, and whether the next one is at hand.
Compute = Callable[[Iterator[Any], Iterator[int], Callable[[], bool]], Iterator[Any]]
MOST_ERRORS = 1000  # lines of error that another rank than 0 keeps until its part is done


class Run:
    """The prompts, those that are done already, and what becomes of the others.

    Attributes:
        prompts: those that are not done; where they are a list, none is.
        count: how many there are, with those that are done; None where that is not known.
        first: how many are done.
        outcomes_a_prompt: lines a prompt.
        output_file: where results go; None is standard output.
        keep: bytes of results in it.
        failed: whether one of those is an error.
        record: what lies beside the file that is written, for the next run.
        done: what an earlier run has left of the output of all ranks.
        output_record: what lies beside that.
    """

    def __init__(
        self,
        prompts: Any,
        done: ResumePoint,
        args: argparse.Namespace,
        record: RunRecord,
        indexes: Iterator[int] | None = None,
    ) -> None:
        """Takes prompts that are not done, and their indexes in the input."""
        self.prompts, self.first, self.keep = prompts, done.prompts, done.size
        self.failed, self.done = done.failed, done
        self.record = self.output_record = record
        self.count = len(prompts) if isinstance(prompts, list) else getattr(prompts, "count", None)
        self.outcomes_a_prompt = _form(args).texts
        self.output_file: str | None = args.output_file
        self._args, self._ready = args, getattr(prompts, "ready", lambda: True)
        self._indexes = count(done.prompts) if indexes is None else indexes

    @staticmethod
    def of(
        prompts: Any,
        args: argparse.Namespace,
        ranks: Ranks,
        prefix: str,
        chosen: Pair,
    ) -> Run:
        """The run that the options ask for, and what `--resume` keeps of its output.

        Args:
            prompts: of rank 0, or of a process alone; draws those that are done.
            args: the options, with the settings of the model's own files.
            ranks: that do it; all of them call this.
            prefix: that is put before every prompt.
            chosen: the models.

        Raises:
            UserError: the output, or a part of it, cannot be resumed.
        """
        record, done = RunRecord(), ResumePoint()
        with agreeing(ranks):
            if args.output_file and (args.parallel or not ranks.rank):
                record = record_of(args, prefix, chosen)
            if args.resume and isinstance(prompts, Lines):
                done = find_resume_point(args.output_file, prompts, _form(args), prompts.count)
                done = replace(done, failed=record.failed_of(done.prompts) or done.failed)
        done = ResumePoint(*ranks.shared(astuple(done)))
        with agreeing(ranks):
            if args.parallel:
                return PartRun(done, args, ranks, record)
            if ranks.size > 1 and not isinstance(prompts, list):
                from mlx_t5.machines.prompts import SharedPrompts

                prompts = SharedPrompts(prompts, ranks)
            run = Run(prompts, done, args, record)
            if ranks.rank:
                run.output_file = os.devnull
        return run

    def resumed(self) -> int:
        """How many prompts all ranks have done before."""
        return self.first

    def log_resumed(self) -> None:
        """Says what is resumed, of all prompts and of a part, and what is unknown of them."""
        if resumed := self.resumed():
            log(f"resuming: {resumed}{f' of {self.count}' if self.count else ''} prompts are done")
        outputs = {(self.done.prompts, self.output_record), (self.first, self.record)}
        for prompts, beside in outputs:
            if prompts and not beside.existed:
                log(f"warning: there is no {beside.path}, so nothing says what made the output")

    def outcomes(self, compute: Compute) -> Iterator[tuple[int, Any, Any]]:
        """The prompts with their numbers, from 1, and what becomes of them, in order.

        Args:
            compute: makes the outcomes; it draws a prompt first, and then its index.
        """
        in_hand: deque[tuple[int, Any]] = deque()

        def drawn() -> Iterator[Any]:
            for index, prompt in zip(self._indexes, self.prompts, strict=False):
                in_hand.append((index + 1, prompt))
                yield prompt

        def indexes() -> Iterator[int]:
            while True:
                yield in_hand[-1][0] - 1

        for done, outcome in enumerate(compute(drawn(), indexes(), self._ready), 1):
            yield *in_hand[0], outcome
            if done % self.outcomes_a_prompt == 0:
                in_hand.popleft()

    def log_error(self, line: str) -> None:
        """Tells what went wrong with a prompt."""
        log(f"error: {line}")

    def finish(self, totals: Totals, status: int) -> tuple[Totals, int]:
        """Called at the end; returns the totals of all ranks, and the worst status."""
        return totals, status


class PartRun(Run):
    """A rank's own prompts of a file."""

    def __init__(
        self, done: ResumePoint, args: argparse.Namespace, ranks: Ranks, record: RunRecord
    ) -> None:
        """Finds them, and what an earlier run has done of them.

        Raises:
            UserError: the file or the part cannot be read.
        """
        from mlx_t5.machines.parts import Part

        self._part: Part = Part(args.output_file, done.prompts, ranks)
        lines, self._ranks = lines_of(args), ranks
        part_record = record.of_part(self._part.path)
        if done.all or not args.resume:
            self._part.remove()
            part_record.finish(0)
        part_record.resume()
        prompts, total = self._part.of(lines), self._part.count(lines.count or 0)
        part_done = find_resume_point(self._part.path, prompts, _form(args), total)
        first = self._part.first + part_done.prompts * ranks.size
        super().__init__(prompts, part_done, args, part_record, count(first, ranks.size))
        self.done, self.output_record = done, record
        self.failed = done.failed or part_done.failed or part_record.failed_of(first)
        self.count, self.output_file = total, self._part.path
        self._errors: list[str] = []

    def resumed(self) -> int:
        """See `Run`."""
        return self.done.prompts + sum(self._ranks.gathered(self.first))

    def log_error(self, line: str) -> None:
        """See `Run`; what is said of another rank's prompts, rank 0 says at the end."""
        if self._ranks.rank == 0:
            super().log_error(line)
        elif len(self._errors) < MOST_ERRORS:
            self._errors.append(line)

    def finish(self, totals: Totals, status: int) -> tuple[Totals, int]:
        """See `Run`; joins the parts.

        Raises:
            UserError: the output cannot be written.
        """
        self._part.join(self.outcomes_a_prompt, self.done.size, self._writer)
        reports = self._ranks.gathered([asdict(totals), status, self._errors, self.record.failed])
        self.record.finish(0)  # the part is gone
        if self._ranks.rank:
            return totals, 0  # the launcher would end the others for any other status
        self.record = self.output_record
        self.record.join(chain.from_iterable(failed for *_, failed in reports))
        for _, _, errors, _ in reports:
            for line in errors:
                super().log_error(line)
        if self._args.verbose:
            results = [f"{rank}: {sums['results']}" for rank, (sums, *_) in enumerate(reports)]
            log("results by rank: " + ", ".join(results))
        worst = max(status for _, status, *_ in reports)
        return totals.of_all([sums for sums, *_ in reports]), worst

    def _writer(self, path: str) -> LineFile | ArrayFile:
        if not self._args.output_file.endswith(ARRAY):
            return LineFile(path, self.done.size)
        from mlx_t5.cli.array_file import ArrayFile

        return ArrayFile(path)


def prefixed(prompts: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Puts a prefix before prompts; targets and errors stay as they are."""
    for prompt in prompts:
        if isinstance(prompt, tuple):
            yield prefix + prompt[0], prompt[1]
        else:
            yield prefix + prompt if isinstance(prompt, str) else prompt


def lines_of(args: argparse.Namespace) -> Lines:
    """The input file's; with predictions where these may be copied from."""
    proposing = not (args.score or args.embed or args.regular_decode)
    return Lines(args.input_file, args.score, "prediction" if proposing else "")


def unpaired(items: Iterable[Any]) -> tuple[Iterator[Any], Iterator[Any]]:
    """Prompts, and the prediction of each; None where it has none."""
    prompts, predictions = tee(i if isinstance(i, tuple) else (i, None) for i in items)
    return (prompt for prompt, _ in prompts), (prediction for _, prediction in predictions)


def _form(args: argparse.Namespace) -> Form:
    """What the lines of the output look like."""
    if args.score or args.embed:
        return Form(1, "logprob" if args.score else "embedding")
    texts = args.num_samples * args.num_return_sequences  # one of them is 1
    return Form(texts, "text" if args.json else None)
