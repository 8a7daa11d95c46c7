"""The models that are measured, and the decoders that are made of them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import machine, printing
from benchmarks.workload import DRAFT, LOOKUP, REGULAR, header_fields
from convert import convert
from decoder import Engine, SpeculativeDecoder
from mlx_t5.backend import mx
from mlx_t5.cli.models import locate
from mlx_t5.drafting.draft_model import Drafter, DraftModel
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.drafting.tally import Tally
from mlx_t5.engine.rows import Result
from mlx_t5.errors import UserError
from mlx_t5.network.compiled import compiled_step
from mlx_t5.text.detokenizer import same_vocabulary
from model import T5, load


class Passes:
    """A draft that counts the passes of its decoder, those of a compiled step as well.

    Attributes:
        model: the draft.
        count: of the passes.
    """

    def __init__(self, model: T5):
        self.model, self.count = model, 0
        self._step = compiled_step(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def decode(self, *args: Any, **options: Any) -> mx.array:
        """As `T5.decode`."""
        self.count += 1
        return self.model.decode(*args, **options)

    def step(self, tokens: mx.array, cache: Any, offsets: list[int]) -> mx.array:
        """As `compiled_step` of the draft."""
        self.count += 1
        return self._step(tokens, cache, offsets)


class Counting(SpeculativeDecoder):
    """A decoder that counts its steps.

    A pass that was begun early and that no step took is none of them.

    Attributes:
        widths: positions a row that the target verified → steps.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.widths: Counter[int] = Counter()

    def engine(self, *args: Any, **options: Any) -> Engine:
        """As `SpeculativeDecoder.engine`."""
        engine = super().engine(*args, **options)
        engine.on_verified = self._count
        return engine

    def _count(self, rows: Any, logits: mx.array, tokens: mx.array) -> None:
        self.widths[logits.shape[1]] += 1


@dataclass
class Run:
    """What a turn of decoding made.

    Attributes:
        results: of its prompts.
        widths: positions a row → steps; each is a pass of the target.
        draft_passes: passes of the draft.
    """

    results: list[Result]
    widths: Counter
    draft_passes: int


@dataclass
class Subject:
    """A pair, loaded.

    Attributes:
        target: the model whose output is wanted.
        draft: the model that proposes.
        tokenizer: of both.
    """

    target: T5
    draft: Any  # T5, or `Passes` around one
    tokenizer: Any

    @classmethod
    def load(cls, model: str, draft_model: str, dtype: str | None) -> Subject:
        """Loads a pair by the names that main.py knows too.

        Raises:
            UserError: a folder is missing or unusable, or the tokenizers differ.
        """
        target, tokenizer = load(locate(model, convert), dtype)
        draft, draft_tokenizer = load(locate(draft_model, convert), dtype, shared_with=target)
        if tokenizer is None:
            raise UserError(f"{model} has no tokenizer, and prompts are texts; add its files")
        if draft_tokenizer is not None:
            same_vocabulary(tokenizer, draft_tokenizer)
        return cls(target, draft, tokenizer)

    def regular(self) -> SpeculativeDecoder:
        """The target alone."""
        return SpeculativeDecoder(self.target, None, self.tokenizer)

    def drafter(self, proposer: str) -> Drafter:
        """What proposes: one of `PROPOSERS`."""
        step = self.draft.step if isinstance(self.draft, Passes) else None
        model = DraftModel(self.draft, self.target, step)
        if proposer == DRAFT:
            return model
        copy = SourceCopy(self.tokenizer)
        return copy if proposer == LOOKUP else CopyOrDraft(copy, model)

    def speculative(
        self, proposer: str, num_draft: int | str, delta: float = 0.0
    ) -> SpeculativeDecoder:
        """The target with one of `PROPOSERS`."""
        drafter = self.drafter(proposer)
        return SpeculativeDecoder(self.target, drafter, self.tokenizer, num_draft, delta=delta)

    def runs(
        self,
        proposer: str,
        num_draft: int | str,
        turns: Sequence[Sequence[str]],
        batch_size: int = 1,
        delta: float = 0.0,
        **options: Any,
    ) -> Callable[[int], Run]:
        """What decodes a turn's prompts, `REGULAR` or by one of `PROPOSERS`, and counts passes."""
        counted = replace(self, draft=Passes(self.draft))
        drafter = None if proposer == REGULAR else counted.drafter(proposer)
        decoder = Counting(self.target, drafter, self.tokenizer, num_draft or None, delta)
        decode = decoding(decoder, turns, batch_size, **options)

        def run(turn: int) -> Run:
            decoder.widths, counted.draft.count = Counter(), 0
            results = decode(turn)
            return Run(results, decoder.widths, counted.draft.count)

        return run


def begin(
    args: argparse.Namespace, command: str, packages: Sequence[str] = (), **more: Any
) -> tuple[Subject, dict[str, Any]]:
    """Loads the pair that the options name and prints the lines above the tables.

    Args:
        args: the subcommand's options.
        command: the line that makes these figures again.
        packages: whose versions count.
        more: settings that decide what the figures mean.

    Returns:
        The pair, and where the figures come from.

    Raises:
        UserError: a model or the place for --json cannot be used.
    """
    printing.check_writable(args.json)
    subject = Subject.load(args.model, args.draft_model, args.dtype)
    facts = machine.environment(machine.dtype_of(subject.target), packages)
    print(printing.header(facts, command, **header_fields(args), **more))
    return subject, facts


def decoding(
    decoder: SpeculativeDecoder, turns: Sequence[Sequence[Any]], batch_size: int, **options: Any
) -> Callable[[int], list[Result]]:
    """What decodes the prompts of a turn, in batches of this size, by `generate`'s options."""

    def run(turn: int) -> list[Result]:
        prompts = list(turns[turn])
        # Every prompt its own seed, the same in every repeat.
        seeds = [turn * len(turns[0]) + i for i in range(len(prompts))]
        results = list(decoder.results(prompts, seed=seeds, batch_size=batch_size, **options))
        failed = next((result.error for result in results if result.error), None)
        if failed:
            raise UserError(f"a prompt could not be decoded ({failed}); leave it out or shorten it")
        return results

    return run


def decided(run: Run) -> int:
    """Tokens of a run, EOS included."""
    return Tally.of(run.results).decided
