"""The interface of a drafter: offers, choices and proposals.

A drafter guesses the next tokens of every row of a batch, and the target checks them. A poor
drafter only costs time: the output stays correct. A step asks the drafter for `offers`, chooses an
offer and a number of its tokens for each row (adaptive.py), and lets the drafter `propose` them.

A new source of proposals needs one file with a `Kind` and a `Drafter`.

Symbols: gamma proposals; delta leniency of the target's check (sampling/acceptance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mlx_t5.backend import mx
from mlx_t5.model import T5
from mlx_t5.sampling.draws import Sampling

Rows = Sequence[Sequence[int]]  # tokens of each row


@dataclass(frozen=True)
class Kind:
    """A kind of proposals with a common acceptance rate.

    Attributes:
        name: the kind's name, for messages and tests.
        accepted: number of accepted proposals with which the estimate of the rate starts.
        rejected: number of rejected proposals with which the estimate of the rate starts.
        writer: origin of the tokens, for statistics and results: "draft" or "copy".
        drafted: whether each proposal costs a pass of a draft model.
    """

    name: str
    accepted: float
    rejected: float
    writer: str = "copy"
    drafted: bool = False

    @property
    def alpha(self) -> float:
        """The acceptance rate that is assumed before the first proposal of this kind."""
        return self.accepted / (self.accepted + self.rejected)


class Offer(NamedTuple):
    """Tokens that a drafter could propose for a row.

    Attributes:
        kind: the kind of the tokens.
        tokens: the tokens if they are known already; None if a draft model has to run.
        unread: number of tokens that the draft model has not read yet: the source's tokens, and
            the row's tokens except the last.
    """

    kind: Kind
    tokens: Sequence[int] | None = None
    unread: int = 0

    def choice(self, length: int) -> Choice:
        """Returns the choice of this offer's first `length` tokens."""
        if self.tokens is None:
            return Choice(length, length)
        copied = self.tokens[:length]
        return Choice(len(copied), 0, copied)


class Choice(NamedTuple):
    """What a row proposes in a step.

    Attributes:
        length: number of proposals.
        passes: number of draft passes; 0 if the proposals are copied.
        tokens: the copied tokens; empty if a draft model proposes.
    """

    length: int = 0
    passes: int = 0
    tokens: Sequence[int] = ()


NOTHING = Choice()


@dataclass
class Proposal:
    """The proposals of all rows for one step.

    Attributes:
        tokens: int32 (rows, gamma), where gamma is the largest of `lengths`; a row's entries past
            its own length are padding. None if gamma is 0.
        q: (rows, gamma, vocabulary) probabilities that the tokens were sampled from; None if no row
            has delta > 0, or if all proposals are deterministic: q(x) = 1.
        lengths: number of proposals of each row, without padding.
        writers: origin of each row's proposals, "draft" or "copy"; "" if no row has any.
        valid_lengths: int32, each row's number of proposals before the draft's first non-finite
            logits; only these may be accepted. The logits are not checked if all rows are greedy
            with delta = 0, as the target then accepts only tokens that it chooses itself.
    """

    tokens: mx.array | None
    q: mx.array | None
    lengths: list[int]
    writers: list[str]
    valid_lengths: mx.array

    @classmethod
    def nothing(cls, rows: int) -> Proposal:
        """Returns a proposal without tokens for `rows` rows."""
        return cls(None, None, [0] * rows, [""] * rows, mx.array([0] * rows, mx.int32))


class Drafter(Protocol):
    """Proposes tokens for the rows of one batch. A row is identified by its index in the batch."""

    @property
    def model(self) -> T5 | None:
        """The draft model; None if the drafter has no model."""

    def fresh(self) -> Drafter:
        """Returns an empty drafter of the same kind, for a new batch."""

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Adds rows at the end of the batch, without using the device.

        Args:
            sources: source tokens of each row.
            states: the target's encoder output (source tokens, d_model) of each source, for drafts
                that use it.
        """

    def offers(self) -> Sequence[Sequence[Offer]]:
        """Returns for each row at most one offer of draft tokens and one of copied tokens."""

    def propose(
        self, committed: Rows, choices: Sequence[Choice], sampling: Sampling, keys: mx.array | None
    ) -> Proposal | None:
        """Returns the proposed next tokens, without waiting for the device.

        Args:
            committed: tokens of each row so far, the start token first.
            choices: the chosen number of proposals of each row, and the tokens if it copies.
            sampling: settings of the rows.
            keys: (rows, positions, 2) random keys of each row's next positions; None if every row
                is greedy.

        Returns:
            The proposal; None if no row gets any tokens.
        """

    def note(self, committed: Rows) -> None:
        """Updates the drafter with the tokens of each row after a step."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""
