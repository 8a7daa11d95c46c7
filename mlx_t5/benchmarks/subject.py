"""Loads the models that are measured, and makes decoders of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.benchmarks import machine, printing
from mlx_t5.benchmarks.workload import DRAFT, header_fields
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.named import make_drafter, split_name
from mlx_t5.drafting.proposals import Proposal
from mlx_t5.engine.rows import Result, total
from mlx_t5.errors import UserError
from mlx_t5.loading import choose_pair
from mlx_t5.model import T5, load
from mlx_t5.network.compiled import compile_at_once
from mlx_t5.sampling.draws import one_hot
from mlx_t5.settings import NONE
from mlx_t5.text.tokenizer import same_vocabulary


@dataclass
class Subject:
    target: T5
    draft: T5 | None
    tokenizer: Any
    names: tuple[str, str]  # of the folders; `NONE` without a draft

    @classmethod
    def load(cls, model: str, draft_model: str | None, dtype: str | None) -> Subject:
        """Loads a pair; without a name for the draft, the target's default draft, if any."""
        pair = choose_pair(model, draft_model)
        target, tokenizer = load(pair.target, dtype)
        if tokenizer is None:
            raise UserError(f"{model} has no tokenizer, and prompts are texts; add its files")
        draft = None
        if pair.draft:
            draft, draft_tokenizer = load(pair.draft, dtype, shared_with=target)
            same_vocabulary(tokenizer, draft_tokenizer)
        compile_at_once(*filter(None, (target, draft)))
        return cls(target, draft, tokenizer, (str(pair.target), str(pair.draft or NONE)))

    def require_draft(self) -> T5:
        if self.draft is None:
            raise UserError("this needs a draft: name one with --draft-model, or take lookup alone")
        return self.draft

    def decoder(
        self,
        proposer: str,
        num_draft: int | str = 0,
        delta: float = 0.0,
        wrong: int = 0,
        exact: bool = False,
    ) -> SpeculativeDecoder:
        name, drafter = split_name(proposer)
        draft = None
        if name == DRAFT:
            draft = DraftModel(self.require_draft(), self.target)
            if wrong:
                draft = WorsenedDraft(draft.model, self.target, wrong)
        copy = make_drafter(drafter, self.tokenizer) if drafter else None
        pair = self.target, draft, self.tokenizer
        return SpeculativeDecoder(*pair, num_draft or None, delta, copy=copy, exact=exact)


class WorsenedDraft(DraftModel):
    """A draft some of whose proposals (`wrong` percent) are replaced by wrong tokens."""

    def __init__(self, model: T5, target: T5, wrong: int) -> None:
        super().__init__(model, target)
        self.wrong, self.random = wrong, np.random.default_rng(0)

    def empty(self) -> WorsenedDraft:
        return WorsenedDraft(self.model, self.target, self.wrong)

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        if proposal.tokens is None:
            return proposal
        tokens, size = proposal.tokens, self.model.config.vocab_size
        chosen = mx.array(100 * self.random.random(tokens.shape) < self.wrong)
        proposal.tokens = mx.where(chosen, (tokens + 1) % size, tokens)
        if proposal.q is not None:
            certain = one_hot(proposal.tokens, proposal.q.shape[-1])
            proposal.q = mx.where(chosen[..., None], certain, proposal.q)
        return proposal


def begin(args: argparse.Namespace, command: str, **more: Any) -> tuple[Subject, dict[str, Any]]:
    printing.check_writable(args.json)
    subject = Subject.load(args.model, args.draft_model, args.dtype)
    _, args.draft_model = subject.names
    facts = machine.environment(machine.dtype_of(subject.target))
    print(printing.header(facts, command, **header_fields(args), **more))
    return subject, facts


def decoding(
    decoder: SpeculativeDecoder,
    turns: Sequence[Sequence[Any]],
    batch_size: int,
    predictions: Sequence[Sequence[str]] | None = None,
    **options: Any,
) -> Callable[[int], list[Result]]:
    def run(turn: int) -> list[Result]:
        # Every prompt has its own seed, which is the same in every repeat.
        first, prompts = turn * len(turns[0]), turns[turn]
        seeds, texts = range(first, first + len(prompts)), predictions and predictions[turn]
        results: Any = decoder.generate(
            prompts, seed=seeds, batch_size=batch_size, prediction=texts, reuse=False, **options
        )
        failed = next((result.error for result in results if result.error), None)
        if failed:
            raise UserError(f"a prompt could not be decoded ({failed}); leave it out or shorten it")
        return results

    return run


def decode_document(
    decoder: SpeculativeDecoder, texts: Sequence[str], **options: Any
) -> list[list[int]]:
    """Decodes a document; returns the tokens of each sentence, which must be those of `texts`."""
    prefix = texts[0].partition(": ")[0] + ": "
    text = " ".join(text.removeprefix(prefix) for text in texts)
    chunks = list(decoder.stream(text, split="sentences", prefix=prefix, **options))
    tokens = [chunk.tokens for chunk in chunks]
    answers = [decoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    of_one_task = all(text.startswith(prefix) for text in texts) and len(tokens) == len(texts)
    if not of_one_task or "".join(chunk.text for chunk in chunks) != " ".join(answers):
        raise UserError("these prompts are not single sentences of one task; name others")
    return tokens


def decided(results: Sequence[Result]) -> int:
    return total(results).decided
