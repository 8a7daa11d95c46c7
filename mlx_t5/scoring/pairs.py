"""Pairs of a prompt and a target, their scores, and the ranking of documents by scores.

Reranking is scoring: monoT5 (Nogueira et al., https://arxiv.org/abs/2003.06713) reads a query and a
document and answers "true" or "false"; the scores of these two words are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_t5.errors import UserError, brief
from mlx_t5.network.cache import Cache
from mlx_t5.network.encoding import by_length
from mlx_t5.settings import is_listlike, refusal
from mlx_t5.text.prompts import token_ids

# monoT5 was trained on prompts of at most RERANK_TOKENS. In a longer prompt the document is cut, so
# that the cue at the end stays: https://github.com/terrierteam/pyterrier_t5.
RERANK_PROMPT, RERANK_CUE = "Query: {query} Document: {document}", " Relevant:"
RERANK_TOKENS = 512
TRUE, FALSE = "true", "false"


@dataclass(frozen=True)
class Pair:
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass
class LastEncoded:
    """The prompts of the last pass and their cache (None: freed), for calls to share."""

    sources: list[tuple[int, ...]] = field(default_factory=list)
    cache: Cache | None = None


@dataclass
class Score:
    """The log-probability of a target.

    Attributes:
        logprob: natural logarithm of the target's probability, the sum of `token_logprobs`; NaN if
            the target could not be scored.
        token_logprobs: log-probability of each token, given the prompt and the tokens before it.
        tokens: the target's token ids; a target given as text ends with the end token.
        error: the error message, if the target could not be scored.
    """

    logprob: float = math.nan
    token_logprobs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, outcome: Score | Exception) -> Score:
        return outcome if isinstance(outcome, Score) else cls(error=str(outcome))


@dataclass(frozen=True)
class Ranked:
    """The natural logarithm of the probability that document `index` is relevant."""

    index: int
    score: float


def grouped(pairs: Sequence[Pair], size: int, most_tokens: float = math.inf) -> Iterator[list[int]]:
    """Groups pairs into forward passes of at most `size` pairs; yields their indices.

    The prompts of a pass have the same number of targets, and similar lengths: at most
    `most_tokens` with their longest targets, padded. A prompt with more than `size` targets takes
    several passes. Pairs with the same prompt are adjacent.
    """
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, pair in enumerate(pairs):
        of_prompt.setdefault(pair.source, []).append(i)
    by_count: dict[int, list[list[int]]] = {}
    for indices in of_prompt.values():
        indices.sort(key=lambda i: len(pairs[i].target))
        by_count.setdefault(len(indices), []).append(indices)
    for count, groups in by_count.items():
        longest = [pairs[indices[-1]] for indices in groups]
        lengths = [len(pair.source) + len(pair.target) for pair in longest]
        for batch in by_length(lengths, max(1, size // count), most_tokens):
            for first in range(0, count, size):  # several passes only for a single prompt
                yield [i for group in batch for i in groups[group][first : first + size]]


def relevance_pairs(
    query: str,
    documents: Iterable[str],
    tokenizer: Any,
    vocab_size: int,
    words: Sequence[str] = (TRUE, FALSE),
    max_prompt_tokens: int = RERANK_TOKENS,
    max_document_tokens: int | None = None,
) -> Iterator[Pair]:
    """Yields two pairs per document: its prompt with words[0] as target, then with words[1].

    Documents of more than `max_document_tokens` are cut, and those whose prompt would have more
    than `max_prompt_tokens`.
    """
    if tokenizer is None:
        raise UserError("ranking needs a tokenizer; add one to the model folder")
    if not is_listlike(documents):
        raise refusal("documents", documents, "a list of texts")
    targets = [_word(word, tokenizer) for word in words]

    def read(text: str) -> tuple[int, ...]:
        return tuple(token_ids(text, tokenizer, vocab_size))

    def prompt_of(document: str) -> tuple[int, ...]:
        prompt = RERANK_PROMPT.format(query=query, document=document)
        ids, cue = read(prompt + RERANK_CUE), read(RERANK_CUE.strip())
        before = len(read(RERANK_PROMPT.format(query=query, document="").strip())) - 1  # EOS
        budget = max_prompt_tokens - len(cue)
        if max_document_tokens and len(read(document)) - 1 > max_document_tokens:
            budget = min(budget, before + max_document_tokens)
        elif len(ids) <= max_prompt_tokens:
            return ids
        if before >= budget:
            limit = f"{max_prompt_tokens} tokens"
            raise UserError(f"the query leaves no room for a document in {limit}")
        return read(prompt)[:budget] + cue

    for name, text in [("query", query), *((f"document {i}", d) for i, d in enumerate(documents))]:
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"the {name} is empty or no text; give a text")
        if name != "query":
            source = prompt_of(text)
            yield from (Pair(source, (target,)) for target in targets)


def ranks_by(tokenizer: Any, words: Sequence[str] = (TRUE, FALSE)) -> bool:
    """Whether each of the words is a single token, which ranking requires."""
    try:
        return all(_word(word, tokenizer) >= 0 for word in words)
    except UserError:
        return False


def _word(word: str, tokenizer: Any) -> int:
    ids = token_ids(word, tokenizer, len(tokenizer))[:-1]
    if word.startswith("▁"):  # a token's own name
        ids = [tokenizer.convert_tokens_to_ids(word)]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        cure = "ranking is for models like monoT5: name the words that yours answers"
        raise UserError(f"{brief(word)!r} is no single token of this model; {cure}")
    return ids[0]


def ranking(scores: Sequence[Score], top_n: int | None = None) -> list[Ranked]:
    """Ranks documents by the scores of `relevance_pairs`; raises the error of a score."""
    failed = next((score.error for score in scores if score.error), None)
    if failed:
        raise UserError(failed)
    against = [no.logprob - yes.logprob for yes, no in zip(scores[::2], scores[1::2], strict=True)]
    # This is -log(1 + exp(x)), in a form that does not overflow for a large x.
    ranked = [
        Ranked(i, -max(x, 0.0) - math.log1p(math.exp(-abs(x)))) for i, x in enumerate(against)
    ]
    return sorted(ranked, key=lambda document: (-document.score, document.index))[:top_n]
