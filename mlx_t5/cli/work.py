"""The prompts of a command line: all of them, those that ranks decode together, or a rank's own."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.input import Lines
from mlx_t5.cli.resume import Form, Kept, kept
from mlx_t5.cli.run_record import RunRecord
from mlx_t5.errors import UserError
from mlx_t5.machines.launched import LAUNCH

if TYPE_CHECKING:
    from mlx_t5.cli.output import Totals
    from mlx_t5.machines.parts import Part
    from mlx_t5.network.ranks import Ranks

InHand = deque[tuple[int, Any]]  # prompts with their numbers, until their outcomes are written
Work = Callable[[Iterator[Any], Iterator[int], Callable[[], bool]], Iterator[Any]]
MOST_ERRORS = 1000  # lines of error that another rank than 0 keeps until its part is done


def check_ranks(args: argparse.Namespace, ranks: Ranks) -> None:
    """Refuses what several ranks cannot do.

    Raises:
        UserError: the options ask for it.
    """
    if ranks.size > 1 and "-" in [*(args.prompt or []), args.input_file]:
        raise UserError("mlx.launch never ends standard input, so - cannot be read; name a file")
    if args.parallel and ranks.size == 1:
        raise UserError(f"--parallel data needs ranks; start it with: {LAUNCH}")


def done_of(prompts: Any, args: argparse.Namespace, record: RunRecord) -> Kept:
    """What `--resume` keeps of the output; draws as many prompts.

    Args:
        prompts: of the input.
        args: the options.
        record: what lies beside the output.

    Raises:
        UserError: the output cannot be resumed.
    """
    if not (args.resume and isinstance(prompts, Lines)):
        return Kept()
    done = kept(args.output_file, prompts, _form(args), prompts.count)
    return replace(done, failed=record.failed_of(done.prompts) or done.failed)


def is_json(args: argparse.Namespace) -> bool:
    """Whether results are objects."""
    return args.json or (args.output_file or "").endswith(".jsonl")


class Job:
    """The prompts, those that are done already, and what becomes of the others.

    Attributes:
        prompts: those that are not done; where they are a list, none is.
        count: how many there are, with those that are done; None where that is not known.
        first: how many are done.
        output_file: where results go; None is standard output.
        keep: bytes of results in it.
        failed: whether one of those is an error.
        record: what lies beside the output, for the next run.
    """

    def __init__(
        self,
        prompts: Any,
        done: Kept,
        args: argparse.Namespace,
        record: RunRecord,
        places: Iterator[int] | None = None,
    ) -> None:
        """Takes prompts that are not done, and their places in the input."""
        self.prompts, self.first, self.keep = prompts, done.prompts, done.size
        self.failed, self.record = done.failed, record
        self.count = len(prompts) if isinstance(prompts, list) else getattr(prompts, "count", None)
        self.output_file: str | None = args.output_file
        self._args, self._ready = args, getattr(prompts, "ready", lambda: True)
        self._places = count(done.prompts) if places is None else places

    @staticmethod
    def of(
        prompts: Any, done: Kept, args: argparse.Namespace, ranks: Ranks, record: RunRecord
    ) -> Job:
        """The job that the options ask for; asks no other rank anything.

        Args:
            prompts: of rank 0, or of a process alone.
            done: what rank 0 keeps of the output.
            args: the options, after the model's own wishes.
            ranks: that do it.
            record: what lies beside the output.

        Raises:
            UserError: a part of the output cannot be resumed.
        """
        if args.parallel:
            return PartJob(done, args, ranks, record)
        if ranks.size > 1 and not isinstance(prompts, list):
            from mlx_t5.machines.prompts import SharedPrompts

            prompts = SharedPrompts(prompts, ranks)
        job = Job(prompts, done, args, record)
        if ranks.rank:
            job.output_file = os.devnull
        return job

    def resumed(self) -> int:
        """How many prompts all ranks have done before."""
        return self.first

    def outcomes(self, work: Work, in_hand: InHand) -> Iterator[Any]:
        """What becomes of the prompts, in order; fills `in_hand` with those that are drawn.

        Args:
            work: makes outcomes of prompts, their indexes, and whether the next one is at hand.
            in_hand: the caller takes out what it has written.
        """
        places: deque[int] = deque()

        def drawn() -> Iterator[Any]:
            for place, prompt in zip(self._places, self.prompts, strict=False):
                in_hand.append((place + 1, prompt))
                places.append(place)
                yield prompt

        def indexes() -> Iterator[int]:
            while True:  # `results` draws a prompt first, and then its index
                yield places.popleft()

        return work(drawn(), indexes(), self._ready)

    def tell_error(self, line: str) -> None:
        """Tells what went wrong with a prompt."""
        print(f"error: {line}", file=sys.stderr, flush=True)

    def finish(self, totals: Totals, status: int) -> tuple[Totals, int]:
        """Called at the end; returns the totals of all ranks, and the worst status."""
        return totals, status


class PartJob(Job):
    """A rank's own prompts of a file."""

    def __init__(
        self, done: Kept, args: argparse.Namespace, ranks: Ranks, record: RunRecord
    ) -> None:
        """Finds them, and what an earlier run has done of them.

        Raises:
            UserError: the file or the part cannot be read.
        """
        from mlx_t5.machines.parts import Part

        self._part: Part = Part(args.output_file, done.prompts, ranks)
        lines, self._ranks, self._kept = Lines(args.input_file, targets=args.score), ranks, done
        self._whole, own_record = record, record.of_part(self._part.path)
        if done.all or not args.resume:
            self._part.remove()
            own_record.finish(0)
        own_record.resume()
        own, own_count = self._part.of(lines), self._part.count(lines.count or 0)
        here = kept(self._part.path, own, _form(args), own_count)
        place = self._part.first + here.prompts * ranks.size
        super().__init__(own, here, args, own_record, count(place, ranks.size))
        self.failed = done.failed or here.failed or own_record.failed_of(place)
        self.count, self.output_file = own_count, self._part.path
        self._errors: list[str] = []

    def resumed(self) -> int:
        """See `Job`."""
        return self._kept.prompts + sum(self._ranks.gathered(self.first))

    def tell_error(self, line: str) -> None:
        """See `Job`; what is said of another rank's prompts, rank 0 says at the end."""
        if self._ranks.rank == 0:
            super().tell_error(line)
        elif len(self._errors) < MOST_ERRORS:
            self._errors.append(line)

    def finish(self, totals: Totals, status: int) -> tuple[Totals, int]:
        """See `Job`; joins the parts.

        Raises:
            UserError: the output cannot be written.
        """
        self._part.join(_texts(self._args), self._kept.size, self._writer)
        reports = self._ranks.gathered([asdict(totals), status, self._errors, self.record.failed])
        self.record.finish(0)  # the part is gone
        if self._ranks.rank:
            return totals, 0  # the launcher would end the others for any other status
        self.record = self._whole
        self.record.join(chain.from_iterable(failed for *_, failed in reports))
        for _, _, errors, _ in reports:
            for line in errors:
                super().tell_error(line)
        if self._args.verbose:
            shares = [f"{rank}: {own['results']}" for rank, (own, *_) in enumerate(reports)]
            print("results by rank: " + ", ".join(shares), file=sys.stderr, flush=True)
        worst = max(status for _, status, *_ in reports)
        return totals.of_all([own for own, *_ in reports]), worst

    def _writer(self, path: str) -> Any:
        from mlx_t5.cli.one_pass import ARRAY, ArrayOfLines
        from mlx_t5.cli.output import LineFile

        if self._args.output_file.endswith(ARRAY):
            return ArrayOfLines(path)
        return LineFile(path, self._kept.size)


def prefixed(prompts: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Puts a prefix before prompts; targets and errors stay as they are."""
    for prompt in prompts:
        if isinstance(prompt, tuple):
            yield prefix + prompt[0], prompt[1]
        else:
            yield prefix + prompt if isinstance(prompt, str) else prompt


def _texts(args: argparse.Namespace) -> int:
    """Outcomes a prompt."""
    one_pass = args.score or args.embed
    return 1 if one_pass else args.num_samples * args.num_return_sequences  # one of them is 1


def _form(args: argparse.Namespace) -> Form:
    if args.score or args.embed:
        return Form(1, "logprob" if args.score else "embedding")
    return Form(_texts(args), "text" if is_json(args) else None)
