"""Who does the prompts of a command line: this process alone, or the ranks that share a file."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import INTERRUPTED
from mlx_t5.cli.input import Lines
from mlx_t5.cli.resume import Form, Kept, kept
from mlx_t5.cli.run_record import RunRecord
from mlx_t5.errors import UserError
from mlx_t5.machines import launched, team
from mlx_t5.machines.block_links import BlockClient, BlockServer
from mlx_t5.machines.blocks import AHEAD, Blocks, Share, Work, lead
from mlx_t5.passes import BATCHES_A_WINDOW

if TYPE_CHECKING:
    from mlx_t5.machines.launched import Rank
    from mlx_t5.machines.messages import Codec
    from mlx_t5.machines.team import Team

LEADER = "0"
InHand = deque[tuple[int, Any]]  # prompts with their numbers, until their outcomes are written
Tell = Callable[[str], None]


def rank_of(args: argparse.Namespace) -> Rank | None:
    """Which of the processes that share a file this is; None if it works alone.

    Raises:
        UserError: it has not been told.
    """
    return launched.rank_of(os.environ) if args.parallel else None


def team_of(args: argparse.Namespace) -> Team | None:
    """The ranks that share the model; None if this process has all of it.

    Raises:
        UserError: they cannot work so, or cannot reach each other.
    """
    if args.parallel or launched.alone(os.environ):
        return None
    if "-" in [*(args.prompt or []), args.input_file]:
        raise UserError("mlx.launch never ends standard input, so - cannot be read; name a file")
    return team.join(os.environ)


@contextlib.contextmanager
def silent(rank: Rank | None) -> Iterator[None]:
    """Keeps a rank that does not lead from telling anything but errors."""
    if rank is None or rank.leads:
        yield
        return
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def is_json(args: argparse.Namespace) -> bool:
    """Whether results are objects."""
    return args.json or (args.output_file or "").endswith(".jsonl")


class Job:
    """The prompts, those that are done already, and what becomes of the others.

    Attributes:
        prompts: those that are not done; where they are a list, none is.
        count: how many there are, with those that are done; None where that is not known.
        first: how many are done.
        keep: bytes of their results in the output.
        failed: whether one of those is an error.
        record: what lies beside the output, for the next run.
    """

    def __init__(self, prompts: list[str] | Lines, done: Kept, args: argparse.Namespace) -> None:
        """This process does all prompts that are not done."""
        self.prompts, self.first, self.keep = prompts, done.prompts, done.size
        self.failed, self.record = done.failed, RunRecord()
        self.count = prompts.count if isinstance(prompts, Lines) else len(prompts)
        self._args, self._ready = args, getattr(prompts, "ready", lambda: True)

    @staticmethod
    def of(
        prompts: list[str] | Lines, rank: Rank | None, args: argparse.Namespace, tell: Tell
    ) -> Job:
        """The job that the options ask for.

        Args:
            prompts: none for a rank that does not lead.
            rank: of this process; None if it works alone.
            args: the options, after the model's own wishes.
            tell: shows a line.

        Raises:
            UserError: the output cannot be resumed, or rank 0 cannot listen.
        """
        if rank and not rank.leads:
            return Following(rank, args)
        done = Kept()
        if args.resume and isinstance(prompts, Lines):
            done = kept(args.output_file, prompts, _form(args), prompts.count)
        job = Leading(prompts, done, args, rank, tell) if rank else Job(prompts, done, args)
        if done.prompts and not job.done:
            of_all = f" of {job.count}" if job.count else ""
            tell(f"resuming: {done.prompts}{of_all} prompts are done")
        return job

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.first > 0 and self.first == self.count

    def begin(self, agreed: Callable[[], Mapping[str, str]]) -> None:
        """Called when the models are there; `agreed` makes what all ranks have to have alike."""

    def outcomes(self, work: Work, in_hand: InHand) -> Iterator[Any]:
        """What becomes of the prompts, in order; fills `in_hand` with those that are drawn.

        Args:
            work: makes outcomes of prompts, their indexes, and whether the next one is at hand.
            in_hand: the caller takes out what it has written.
        """
        return work(self._noted(in_hand), count(self.first), self._ready)

    def report(self, verbose: bool) -> None:
        """Tells who has done how many."""

    def _noted(self, in_hand: InHand) -> Iterator[Any]:
        for n, prompt in enumerate(self.prompts, self.first + 1):
            in_hand.append((n, prompt))
            yield prompt


class Leading(Job):
    """Rank 0: hands out the prompts, does a part of them, and gets what becomes of all."""

    def __init__(
        self,
        prompts: list[str] | Lines,
        done: Kept,
        args: argparse.Namespace,
        rank: Rank,
        tell: Tell,
    ) -> None:
        """Listens for the other ranks."""
        super().__init__(prompts, done, args)
        self._size, self._tell = rank.size, tell
        self._server = BlockServer(rank, tell, args.verbose)
        self._agreed: Mapping[str, str] = {}
        self._blocks: Blocks | None = None

    def __exit__(self, *error: Any) -> None:
        if self.done:  # the others come nevertheless
            self._server.share(Blocks(iter(()), 1), {}, _codec(self._args))
        self._server.__exit__(*error)

    def begin(self, agreed: Callable[[], Mapping[str, str]]) -> None:
        """See `Job`."""
        self._agreed = agreed()

    def outcomes(self, work: Work, in_hand: InHand) -> Iterator[Any]:
        """See `Job`."""
        args, texts = self._args, _texts(self._args)
        # A pass over many prompts of like length takes its pick from more of them.
        size = args.batch_size * (BATCHES_A_WINDOW if args.score or args.embed else 1)
        ahead = AHEAD * self._size
        self._blocks = Blocks(iter(self.prompts), size, texts, self.first, self._ready, ahead)
        self._server.share(self._blocks, self._agreed, _codec(args))
        for block in lead(self._blocks, work, texts, LEADER):
            in_hand.extend(enumerate(block.items, block.first + 1))
            yield from block.outcomes

    def report(self, verbose: bool) -> None:
        """See `Job`."""
        if verbose and self._blocks:
            done = dict.fromkeys(range(self._size), 0)
            for name, prompts in self._blocks.prompts.items():
                number = int(name.partition(".")[0])
                done[number] = done.get(number, 0) + prompts
            self._tell("prompts by rank: " + ", ".join(f"{n}: {done[n]}" for n in sorted(done)))


class Following(Job):
    """Another rank: takes prompts from rank 0 and gives it what becomes of them."""

    def __init__(self, rank: Rank, args: argparse.Namespace) -> None:
        """It has no prompts of its own."""
        super().__init__([], Kept(), args)
        self._rank = rank

    def begin(self, agreed: Callable[[], Mapping[str, str]]) -> None:
        """See `Job`; finds rank 0.

        Raises:
            UserError: rank 0 cannot be found, or has another job.
        """
        self._client = BlockClient(self._rank, agreed())

    def outcomes(self, work: Work, in_hand: InHand) -> Iterator[Any]:
        """Yields nothing, as rank 0 gets everything.

        Raises:
            Lost: rank 0 is gone.
        """
        packed = _codec(self._args).packed
        with self._client as rank_0:
            for block, outcomes in Share(rank_0.take, _texts(self._args)).outcomes(work):
                rank_0.deliver(block, [packed(outcome) for outcome in outcomes])
        yield from ()


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


def _codec(args: argparse.Namespace) -> Codec:
    from mlx_t5.machines import outcomes

    return outcomes.SCORES if args.score else outcomes.VECTORS if args.embed else outcomes.TEXTS
