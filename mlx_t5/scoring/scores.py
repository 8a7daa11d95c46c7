"""Scores given texts: the log-probability of each token of a target, given its prompt.

The target's tokens are known, so one decoder pass gives the log-probabilities of all of them, by
the model's own distribution. A long target is decoded in chunks of positions. Targets of the same
prompt share its encoder states and cross-attention.

Symbols: B rows, P prompts, K targets per prompt, T target positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.backend.device_memory import require
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network.cache import source_width
from mlx_t5.network.encoding import in_halves, padded
from mlx_t5.sampling.draws import gather
from mlx_t5.scoring.pairs import (
    FALSE,
    RERANK_TOKENS,
    TRUE,
    LastEncoded,
    Pair,
    Ranked,
    Score,
    grouped,
    ranking,
    relevance_pairs,
)
from mlx_t5.scoring.windows import NotFinite, Part, in_order, no_memory
from mlx_t5.settings import DEFAULT_BATCH_SIZE, POSITIVE, checked, is_listlike, refusal, to_list
from mlx_t5.text.prompts import as_list, checked_prompts, token_ids

# Maximum number of logits computed at once; it decides how many positions a chunk has.
MAX_LOGITS = 1 << 24
PAIR = "a prompt and its target"
NOT_FINITE = "the model's logits are NaN or infinite for this target; compute in another --dtype"


def logprobs(logits: mx.array, tokens: mx.array) -> mx.array:
    """The log-probabilities (B, T) of tokens (B, T), from float32 logits (B, T, V)."""
    return gather(logits, tokens) - mx.logsumexp(logits, axis=-1)


class Scoring:
    """Implements `SpeculativeDecoder.score` and `rerank` for one model; no draft is used."""

    def __init__(self, model: T5, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def score(
        self,
        prompts: Any,
        targets: Any,
        batch_size: int = DEFAULT_BATCH_SIZE,
        attention_mask: Any = None,
    ) -> list[Score]:
        """Returns the log-probabilities of targets, token by token.

        The model's own distribution is used, without temperature or logits processors. A prompt
        with several targets is encoded once.

        Args:
            prompts: one prompt (a text or token ids) for all targets, or one prompt per target.
            targets: one target (a text or token ids), or a list of targets. The end token is added
                to texts; token ids are scored as they are.
            batch_size: maximum number of targets in a pass; it bounds memory.
            attention_mask: as in `SpeculativeDecoder.generate`.

        Returns:
            A score per target, in the same order. With several targets, the score of a target that
            fails has an `error`.

        Raises:
            UserError: the numbers of prompts and targets differ, or a single target fails.
        """
        prompts, single = checked_prompts(prompts, attention_mask=attention_mask)
        targets, _ = as_list(targets, "targets")
        if single:
            prompts = prompts * len(targets)
        if len(prompts) != len(targets):
            counts = f"{len(prompts)} prompts for {len(targets)} targets"
            raise UserError(f"{counts}; give one prompt, or one for each target")
        scored = list(self.scores(zip(prompts, targets, strict=True), batch_size))
        if len(scored) == 1 and scored[0].error:
            raise UserError(scored[0].error)
        return scored

    def scores(
        self,
        pairs: Iterable[tuple[Any, Any] | Exception],
        batch_size: int = DEFAULT_BATCH_SIZE,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[Score]:
        """Yields the score of each pair, lazily; an exception in place of a pair is its `error`."""
        if not is_listlike(pairs):
            raise refusal("pairs", pairs, f"a list, each {PAIR}")
        size = checked("batch_size", batch_size)
        read = partial(token_ids, tokenizer=self.tokenizer, vocab_size=self.model.config.vocab_size)

        def pair_of(value: Any) -> Pair:
            both = to_list(value)
            if both is None or len(both) != 2:
                raise refusal("a pair", value, PAIR)
            return Pair(tuple(read(both[0])), tuple(read(both[1], what="target")))

        parts = partial(self.parts, batch_size=size)
        return map(Score.of, in_order(pairs, pair_of, size, parts, ready))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
        words: tuple[str, str] = (TRUE, FALSE),
        max_prompt_tokens: int = RERANK_TOKENS,
    ) -> list[Ranked]:
        """Ranks documents by their relevance to a query, with a monoT5 model.

        Args:
            query: the query.
            documents: texts.
            top_n: number of documents to return, the most relevant first; None returns all.
            batch_size: maximum number of documents in a pass; each takes two rows, one per word.
            words: the model's answers for relevant and for irrelevant documents; single tokens.
            max_prompt_tokens: maximum number of tokens in a prompt; documents are cut to fit.

        Raises:
            UserError: an argument is invalid or out of range, a text is empty, or a word is not
                exactly one token of the model.
        """
        size = 2 * checked("batch_size", batch_size)
        most = None if top_n is None else checked("top_n", top_n, POSITIVE)
        longest = checked("max_prompt_tokens", max_prompt_tokens, POSITIVE)
        vocab_size = self.model.config.vocab_size
        pairs = list(relevance_pairs(query, documents, self.tokenizer, vocab_size, words, longest))
        outcomes = in_order(pairs, lambda pair: pair, size, partial(self.parts, batch_size=size))
        return ranking(list(map(Score.of, outcomes)), most)

    def parts(
        self,
        pairs: Sequence[Pair],
        batch_size: int,
        most_tokens: float = math.inf,
        last: LastEncoded | None = None,
    ) -> Iterator[Part]:
        """Yields after each pass pairs of an index into `pairs`, and a score or an error.

        A prompt whose targets need several passes is encoded once; several calls may share `last`.
        """
        self.model.require_decoder()
        last = last or LastEncoded()

        score = partial(self._score, last=last)
        try:
            for indices in grouped(pairs, batch_size, most_tokens):
                batch = [pairs[i] for i in indices]
                values = in_halves(score, batch, lambda _, reason: no_memory(PAIR, reason))
                yield list(zip(indices, values, strict=True))
        finally:
            last.cache = None

    def _score(self, pairs: Sequence[Pair], last: LastEncoded) -> list[Score | UserError]:
        scores: dict[int, Score | UserError] = {}
        for indices in grouped(pairs, len(pairs)):
            chosen = [pairs[i] for i in indices]
            for i, pair, row in zip(indices, chosen, self._logprobs(chosen, last), strict=True):
                token_logprobs = row[: len(pair.target)]
                finite = all(map(math.isfinite, token_logprobs))
                score = Score(math.fsum(token_logprobs), token_logprobs, list(pair.target))
                scores[i] = score if finite else NotFinite(NOT_FINITE)
        return [scores[i] for i in range(len(pairs))]

    def _logprobs(self, pairs: Sequence[Pair], last: LastEncoded) -> list[list[float]]:
        """Each target token's log-probability (P · K, T); meaningless past a target's end."""
        model, config = self.model, self.model.config
        sources = list(dict.fromkeys(pair.source for pair in pairs))
        targets, _ = padded([pair.target for pair in pairs], config.pad_token_id)
        rows, length = len(pairs), max(len(pair.target) for pair in pairs)
        targets = targets[:, :length]  # `padded` may pad beyond the longest
        width = min(length, max(1, MAX_LOGITS // (rows * config.vocab_size)))
        if last.sources != sources:
            last.cache = None  # freed before a new cache is made
        self._require([] if last.cache else sources, rows, length, width)
        if last.cache is None:
            ids, mask = padded(sources, config.pad_token_id)
            last.sources, last.cache = sources, model.cache(model.encode(ids, mask), mask)
        cache = last.cache.shared(rows // len(sources), length)
        start = mx.full((rows, 1), config.decoder_start_token_id, targets.dtype)
        inputs = mx.concatenate([start, targets[:, :-1]], axis=1)
        parts = []
        for i in range(0, length, width):
            logits = model.decode(inputs[:, i : i + width], cache, [i] * rows)
            parts.append(logprobs(logits, targets[:, i : i + width]))
            mx.eval(parts)  # the logits of one chunk at a time
        mx.synchronize()  # raises if a pass has failed; Metal may return zeros for it
        return mx.concatenate(parts, axis=1).tolist()

    def _require(self, new: list[tuple[int, ...]], rows: int, target: int, width: int) -> None:
        """Raises RuntimeError unless a pass has memory; it encodes `new` and decodes `rows`."""
        model = self.model
        # float32 logits, and two arrays of the same size that are computed from them.
        needed = 3 * 4 * rows * width * model.config.vocab_size
        needed += model.cache_memory(rows, 0, target)
        if new:
            source = source_width(max(map(len, new)))
            needed += model.encoder_memory(len(new), source)
            needed += model.cache_memory(len(new), source, 1)
        require(needed)
