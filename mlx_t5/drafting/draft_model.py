"""Proposes tokens with a smaller T5 with the same tokenizer (https://arxiv.org/abs/2211.17192).

Symbols: B rows, T tokens fed in a pass, gamma proposals, N different tokens that the draft can
propose (tokens that the target lacks are not counted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.drafting.proposals import Kind, Proposal, Rows
from mlx_t5.errors import UserError
from mlx_t5.model import T5
from mlx_t5.network.draft_vocabulary import DraftVocabulary
from mlx_t5.network.encoding import encoder_states, make_cache
from mlx_t5.sampling.acceptance import accepted_length
from mlx_t5.sampling.draws import OWN, Sampling, fold, is_finite, likeliest, probabilities, sample
from mlx_t5.sampling.processors import History

DRAFT = Kind("draft", 1.2, 0.4)


def check_pair(draft: T5, target: T5) -> None:
    """Checks that a draft can propose tokens to a target.

    Raises:
        UserError: the draft has no decoder, the special tokens differ, or the draft uses the
            encoder of a different target.
    """
    draft.require_decoder("the draft")
    partner = getattr(draft, "shares_with", None)
    if partner is not None and partner.encoder is not getattr(target, "encoder", None):
        cure = "load it with shared_with=target"
        raise UserError(f"the draft uses the encoder of another target; {cure}")
    ends = {"eos_token_id": target.config.eos_token_ids}
    starts = {"decoder_start_token_id": [target.config.decoder_start_token_id]}
    for name, allowed in (ends | starts).items():
        in_target, in_draft = getattr(target.config, name), getattr(draft.config, name)
        if in_draft not in allowed:
            cause = f"{name} is {in_target} in the target and {in_draft} in the draft"
            cure = "use a draft with the same tokenizer"
            raise UserError(f"vocabularies differ: {cause}; {cure}")


class DraftModel:
    """A small T5 that decodes ahead of the target, token by token.

    Between two steps, the draft's cache holds a prefix of each row's tokens. A rollback
    only lowers a row's number of valid positions: the next pass overwrites the positions after the
    last accepted proposal.

    A draft that shares its target's encoder (network/sharing.py) does not encode prompts itself.
    A draft with its own vocabulary (network/draft_vocabulary.py) proposes only the tokens in it.
    """

    def __init__(self, model: T5, target: T5, vocabulary: DraftVocabulary | None = None) -> None:
        """Pairs a draft with its target.

        Args:
            model: the draft.
            target: the model that verifies; both must share a tokenizer, but their numbers of
                embeddings may differ.
            vocabulary: the tokens that the draft can propose; None reads them from the draft, and
                checks that it fits the target.

        Raises:
            UserError: see `check_pair`.
        """
        if vocabulary is None:
            check_pair(model, target)
            vocabulary = DraftVocabulary(model, target.config.vocab_size)
        self.model, self.target, self.vocabulary = model, target, vocabulary
        self.shares_encoder = getattr(model, "shares_with", None) is not None
        self.cache: Any = None  # a `Cache`; None if no row is encoded
        self.fed: list[int] = []  # number of each row's tokens in the cache
        self.sources: list[list[int]] = []  # source tokens of each row
        self.waiting: list[Any] = []  # encoder states, or None, of the rows not yet in the cache

    def empty(self) -> DraftModel:
        """Returns a `DraftModel` with the same model and no rows."""
        return DraftModel(self.model, self.target, self.vocabulary)

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Adds rows at the end of the batch; they are encoded at the first proposal.

        Args:
            sources: source tokens of each row.
            states: the target's encoder output (source tokens, d_model) of each source, for drafts
                that use it.
        """
        config = self.model.config
        unknown, pad = config.vocab_size, config.pad_token_id
        self.sources += [[t if t < unknown else pad for t in source] for source in sources]
        self.waiting += states if states and self.shares_encoder else [None] * len(sources)
        self.fed += [0] * len(sources)

    def propose(
        self, tokens: Rows, lengths: Sequence[int], sampling: Sampling, keys: mx.array | None
    ) -> Proposal:
        """Returns drafted tokens, without waiting for the device.

        All rows draft gamma tokens, the largest of `lengths`. For a row that proposes fewer, the
        last tokens are padding.

        Args:
            tokens: tokens of each row so far, the start token first.
            lengths: number of proposals of each row.
            sampling: settings of the rows.
            keys: (rows, positions, 2) random keys of each row's next positions; None if every row
                is greedy.
        """
        gamma = max(lengths)
        if gamma == 0:
            return Proposal.nothing(len(lengths))
        self.update(tokens)  # proposals that were not verified are forgotten
        try:
            logits = self._catch_up(tokens)
        except (RuntimeError, MemoryError):
            return Proposal.nothing(len(lengths))  # no memory: the target decodes alone
        process, vocabulary = sampling.processing, self.vocabulary
        history = History.align(tokens) if process else None
        xs, qs, finite = list[mx.array](), list[mx.array](), list[mx.array]()
        for i in range(gamma):
            if i > 0:
                positions = [len(row) + i - 1 for row in tokens]
                logits = self._feed(xs[-1], positions)
            if process and history:
                # Not needed for correctness; it improves the draft's guesses.
                history = history.then(xs[-1] if xs else None)
                counts = [min(max(n - i, 0), 1) for n in lengths]
                logits = process(history, vocabulary.spread(logits, -mx.inf), counts)
            if sampling.any_lenient or not sampling.all_greedy:
                finite.append(is_finite(logits))
            if keys is None:  # all are greedy
                token = likeliest(logits)
                if vocabulary.ids is not None and not process:
                    token = vocabulary.ids[token]
            else:  # sampling depends on the vocabulary's size, so q has the target's, like p
                q, _ = probabilities(logits, sampling)
                qs.append(q if process else vocabulary.spread(q, 0.0))
                token = sample(qs[-1][:, 0], fold(keys[:, i], 0, OWN))[:, None]
            mx.async_eval(token)  # the device starts while Python builds the rest of the graph
            xs.append(token)
        # Only a row's own proposals can be committed; tokens fed after these count as not fed.
        self.fed = [len(row) + max(n, 1) - 1 for row, n in zip(tokens, lengths, strict=True)]
        q = mx.concatenate(qs, axis=1) if qs and sampling.any_lenient else None
        valid = mx.array(lengths, mx.int32)
        valid = accepted_length(mx.concatenate(finite, axis=1), valid) if finite else valid
        origins = ["draft"] * len(lengths)
        return Proposal(mx.concatenate(xs, axis=1), q, list(lengths), origins, valid)

    def update(self, tokens: Rows) -> None:
        """Rolls each row's cache back to the last accepted proposal."""
        self.fed = [min(fed, len(row) - 1) for fed, row in zip(self.fed, tokens, strict=True)]

    def unread(self, tokens: Rows) -> list[int]:
        """Returns how many tokens must be read before each row's last one, those of sources too."""
        unread = [len(row) - 1 - fed for fed, row in zip(self.fed, tokens, strict=True)]
        for i in range(len(unread) - len(self.waiting), len(unread)):
            unread[i] += len(self.sources[i])
        return unread

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""
        encoded = len(self.fed) - len(self.waiting)
        self.waiting = [self.waiting[row - encoded] for row in rows if row >= encoded]
        self.fed = [self.fed[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]
        rows = [row for row in rows if row < encoded]
        if rows:
            self.cache.filter(rows)
            self.cache.trim(max(map(len, self.sources[: len(rows)])), max(self.fed))
        else:
            self.cache = None

    def _catch_up(self, rows: Rows) -> mx.array:
        """Reads the sources and feeds the tokens that the cache lacks.

        Usually the cache lacks one token of a row: the target's own. If all proposals of a row were
        accepted, the cache also lacks the last proposal. Rows that lack fewer tokens than others
        are padded. Later tokens overwrite the padding's slots before any query can see them.

        Returns:
            Logits (B, 1, N) after each row's last token.
        """
        if self.waiting:
            sources, states = self.sources[-len(self.waiting) :], self.waiting
            if states[0] is None:  # else they are the target's
                states = encoder_states(self.model, sources)
            cache = make_cache(self.model, sources, states)
            mx.async_eval(cache.state)
            if self.cache is None:
                self.cache = cache
            else:
                self.cache.extend(cache)
            self.waiting = []
        pending = [list(row[fed:]) for fed, row in zip(self.fed, rows, strict=True)]
        width = max(map(len, pending))
        tokens = mx.array([row + [0] * (width - len(row)) for row in pending], mx.int32)
        logits = self._feed(tokens, self.fed)
        if all(len(row) == width for row in pending):
            return logits[:, -1:]
        last = mx.array([len(row) - 1 for row in pending])
        return mx.take_along_axis(logits, last[:, None, None], axis=1)

    def _feed(self, tokens: mx.array, positions: list[int]) -> mx.array:
        """Feeds T tokens to each of B rows; returns logits (B, T, N).

        If the draft lacks a fed token, padding replaces the token, which may worsen the draft's
        guesses.
        """
        config = self.model.config
        if config.vocab_size < self.target.config.vocab_size:
            tokens = mx.where(tokens < config.vocab_size, tokens, config.pad_token_id)
        return self.model.decode(tokens, self.cache, positions)[..., : self.vocabulary.size]
