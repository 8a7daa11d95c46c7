"""Where proposals come from.

A drafter guesses the next tokens of every row of a batch; the target checks
them. Whatever it proposes, the output stays correct: a poor drafter only costs
time. `DraftModel` is a smaller T5 with the same tokenizer, as in
https://arxiv.org/abs/2211.17192. The engine (engine.py) knows drafters only
by the `Drafter` protocol.

Symbols: B rows, S source positions, gamma proposals, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from backend import UserError, mx
from model import T5
from processors import History
from prompts import encoded
from sampling import DRAFT, Sampling, finite, fold, probabilities, sample


@dataclass(frozen=True)
class Offer:
    """What could be proposed for a row.

    Attributes:
        kind: proposals of a kind are about equally good, and each kind is learned about by itself
            (pacer.py): "draft" of a model; "copy" of no model, "weak copy" if little speaks for it,
            "first copy" if nothing is known yet, as the text begins.
        length: how many tokens.
        tokens: the tokens, None if a model has to be asked.
    """

    kind: str
    length: int
    tokens: tuple[int, ...] | None = None

    def cut(self, length: int) -> Offer:
        """The same, of at most so many tokens."""
        tokens = None if self.tokens is None else self.tokens[:length]
        return Offer(self.kind, min(self.length, length), tokens)


NOTHING = Offer("", 0, ())


@dataclass
class Proposal:
    """What a drafter offers for one step.

    Attributes:
        tokens: (B, gamma) int32; a row's entries past its length are padding.
        q: (B, gamma, V) probabilities the tokens were drawn from, or None if
            the proposals are deterministic, q(x) = 1.
        lengths: how many proposals of each row are real.
        writers: who proposed them, one of "draft" and "copy" a row.
        sound: (B, gamma) bool, whether the logits that a token was chosen from were finite; None
            if no model was asked. What follows an unsound token in a row is not judged either.
    """

    tokens: mx.array
    q: mx.array | None
    lengths: list[int]
    writers: list[str]
    sound: mx.array | None = None


class Drafter(Protocol):
    """Proposes tokens for the rows of one batch, which are known by their place.

    Attributes:
        model: the model that is asked, None if there is none.
    """

    model: T5 | None

    def fresh(self) -> Drafter:
        """Returns a drafter of the same kind for another batch, without rows."""

    def insert(self, sources: Sequence[Sequence[int]]) -> None:
        """Adds rows at the end of the batch, or none if there is not enough memory.

        Args:
            sources: source tokens of each row.

        Raises:
            RuntimeError: the device has not enough memory; nothing has changed.
        """

    def offers(
        self,
        committed: Sequence[Sequence[int]],
        limits: Sequence[int],
        resting: Collection[int] = (),
    ) -> list[list[Offer]]:
        """What could be proposed for each row now, what it would rather propose first.

        Args:
            committed: tokens of each row so far, the start token first.
            limits: how many proposals each row can use at most.
            resting: rows for which nothing need be looked for, by place.
        """

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        chosen: Sequence[Offer],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Guesses what follows, without waiting for the device.

        Called once a step, also when no row can use a proposal.

        Args:
            committed: tokens of each row so far, the start token first.
            chosen: the offer that each row takes up, of as many tokens as it wants; or `NOTHING`.
            sampling: settings of the rows.
            keys: (B, 2) keys of this step; None if every row is greedy.

        Returns:
            The proposal, or None if there is nothing to propose.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""


class DraftModel:
    """A small T5 that decodes ahead of the target, token by token.

    Its cache holds a prefix of each row's committed tokens. After a step that
    is arithmetic: of the positions fed, those up to the last accepted proposal
    are still true, and the next block simply overwrites the others.
    """

    def __init__(self, model: T5, target: T5) -> None:
        """Pairs a draft with its target.

        Args:
            model: the draft.
            target: the model that verifies; both must share a tokenizer, while
                the widths of their embeddings may differ.

        Raises:
            UserError: the special tokens differ.
        """
        ends = {"eos_token_id": target.config.eos_token_ids}
        starts = {"decoder_start_token_id": [target.config.decoder_start_token_id]}
        for name, allowed in (ends | starts).items():
            theirs, ours = getattr(target.config, name), getattr(model.config, name)
            if ours not in allowed:
                raise UserError(
                    f"vocabularies differ: {name} is {theirs} in the target and {ours} in the "
                    "draft; use a draft with the same tokenizer"
                )
        self.model, self.target = model, target
        self.cache = None
        self.fed: list[int] = []  # positions of each row that the cache has seen
        self.sources: list[int] = []  # source tokens of each row

    def fresh(self) -> DraftModel:
        """Returns a drafter with the same model and no rows."""
        return DraftModel(self.model, self.target)

    def insert(self, sources: Sequence[Sequence[int]]) -> None:
        """Encodes the source with the draft's own encoder; see `Drafter.insert`."""
        config = self.model.config
        unknown, pad = config.vocab_size, config.pad_token_id
        cache = encoded(self.model, [[t if t < unknown else pad for t in s] for s in sources])
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append(cache)
        self.fed += [0] * len(sources)
        self.sources += [len(source) for source in sources]

    def offers(
        self,
        committed: Sequence[Sequence[int]],
        limits: Sequence[int],
        resting: Collection[int] = (),
    ) -> list[list[Offer]]:
        """The model can be asked for every row; see `Drafter.offers`."""
        return [[Offer("draft", limit)] for limit in limits]

    def propose(
        self,
        committed: Sequence[Sequence[int]],
        chosen: Sequence[Offer],
        sampling: Sampling,
        keys: mx.array | None,
    ) -> Proposal | None:
        """Decodes as many tokens as the most any row wants, in one lazy graph.

        See `Drafter.propose`.
        """
        lengths = [offer.length if offer.tokens is None else 0 for offer in chosen]
        # The block fed last step is true up to the last accepted proposal, and the
        # target then added one token that is not in the cache.
        self.fed = [min(fed, len(row) - 1) for fed, row in zip(self.fed, committed, strict=True)]
        gamma = max(lengths)
        if gamma == 0:
            return None
        logits = self._catch_up(committed, gamma)
        history = History.of(committed) if sampling.processing else None
        tokens, q, sound = [], [], []
        for i in range(gamma):
            if i > 0:
                positions = [len(row) + i - 1 for row in committed]
                logits = self.model.decode(self._known(tokens[-1]), self.cache, positions)
            logits = logits[..., : self.target.config.vocab_size]
            if history:
                # Not needed for the output, but it makes the draft guess better.
                history = history.then(tokens[-1] if tokens else None)
                counts = [min(max(n - i, 0), 1) for n in lengths]
                logits = sampling.processing(history, self._widen(logits, -mx.inf), counts)
            sound.append(finite(logits))
            if sampling.all_greedy:
                token = mx.argmax(logits, axis=-1).astype(mx.int32)
            else:
                q.append(probabilities(logits, sampling))
                token = sample(q[-1][:, 0], fold(keys, i, DRAFT))[:, None]
            mx.async_eval(token)  # the device begins while the host puts together what follows
            tokens.append(token)
        # Past a row's own proposals its cache holds guesses that nobody judges: never take them
        # for what was committed.
        self.fed = [len(row) + max(n, 1) - 1 for row, n in zip(committed, lengths, strict=True)]
        writers = ["draft"] * len(lengths)
        # Ids that only the target has get no mass.
        q = self._widen(mx.concatenate(q, axis=1), 0) if q else None
        tokens, sound = (mx.concatenate(each, axis=1) for each in (tokens, sound))
        return Proposal(tokens, q, lengths, writers, sound)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""
        self.fed = [self.fed[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]
        if self.fed:
            self.cache.keep(rows)
            self.cache.trim(max(self.sources), max(self.fed))
        else:
            self.cache = None

    def _catch_up(self, committed: Sequence[Sequence[int]], gamma: int) -> mx.array:
        """Feeds what was committed since the last proposal; logits (B, 1, V) after it.

        Usually that is the target's last token, and the last proposal too if it
        was accepted. Rows that lack fewer tokens are padded; the padding lands
        in slots that are written again before any query can see them.
        """
        pending = [list(row[fed:]) for fed, row in zip(self.fed, committed, strict=True)]
        width = max(map(len, pending))
        block = mx.array([row + [0] * (width - len(row)) for row in pending], mx.int32)
        self.cache.reserve(max(map(len, committed)) + max(width, gamma))
        logits = self.model.decode(self._known(block), self.cache, self.fed)
        last = mx.array([len(row) - 1 for row in pending])
        return mx.take_along_axis(logits, last[:, None, None], axis=1)

    def _known(self, ids: mx.array) -> mx.array:
        """Ids that only the target has become padding: the draft may guess badly, not fail."""
        config = self.model.config
        if self.target.config.vocab_size <= config.vocab_size:
            return ids
        return mx.where(ids < config.vocab_size, ids, config.pad_token_id)

    def _widen(self, values: mx.array, filler: float) -> mx.array:
        """Fills values (B, T, V of the draft) up to the target's V."""
        missing = self.target.config.vocab_size - values.shape[-1]
        return mx.pad(values, ((0, 0), (0, 0), (0, missing)), constant_values=filler)
