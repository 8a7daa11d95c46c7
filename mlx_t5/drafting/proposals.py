"""The interface of a drafter: offers, choices and proposals.

A drafter guesses the next tokens of every row of a batch, and the target checks them. A poor
drafter only costs time: the output stays correct. A step asks the drafter for `offers`, chooses
how many tokens of which offer to take (adaptive.py), and has it `propose` them.

A new source of proposals is one file with a `Kind` and a `Drafter`.

Symbols: B rows, S source positions, gamma proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mlx_t5.backend import mx

if TYPE_CHECKING:
    from mlx_t5.sampling.draws import Sampling
    from model import T5

Rows = Sequence[Sequence[int]]  # tokens of each row


@dataclass(frozen=True)
class Kind:
    """A kind of proposals with a common acceptance rate.

    Attributes:
        name: for messages and tests.
        accepted: prior number of accepted proposals.
        rejected: prior number of rejected proposals.
        writer: who wrote the tokens in statistics and results: "draft" or "copy".
        drafted: whether each proposal costs a pass of a draft model.
    """

    name: str
    accepted: float
    rejected: float
    writer: str = "copy"
    drafted: bool = False

    @property
    def alpha(self) -> float:
        """The prior probability that a proposal is accepted."""
        return self.accepted / (self.accepted + self.rejected)


class Offer(NamedTuple):
    """Tokens that a drafter could propose for a row.

    Attributes:
        kind: their kind.
        tokens: the tokens if the host knows them; None if a draft model has to be asked.
        unread: tokens of the row that the draft has yet to read, besides the last one.
    """

    kind: Kind
    tokens: Sequence[int] | None = None
    unread: int = 0

    def most(self, room: int) -> int:
        """The number of its tokens, `room` at most."""
        return room if self.tokens is None else min(room, len(self.tokens))

    def first(self, number: int) -> Choice:
        """Chooses its first `number` tokens, or all if it has fewer."""
        return Choice(self, self.most(number))


class Choice(NamedTuple):
    """The offer that a row is proposed, and how many of its tokens."""

    offer: Offer | None = None
    length: int = 0

    @property
    def drafted(self) -> int:
        """Draft passes that it takes."""
        return self.length if self.offer and self.offer.kind.drafted else 0


NOTHING = Choice()


@dataclass
class Proposal:
    """The proposals of all rows for one step.

    Attributes:
        tokens: (B, gamma) int32; a row's entries past its length are padding. None if gamma is 0.
        q: (B, gamma, V) probabilities that the tokens were drawn from; None if no row is lenient,
            or if the proposals are deterministic, q(x) = 1.
        lengths: number of proposals of each row, without padding.
        writers: who proposed each row's tokens, "draft" or "copy".
        valid_lengths: (B,) int32, number of proposals before the draft's first non-finite logits.
            It matters only with delta > 0, where a token other than the target's may be kept.
    """

    tokens: mx.array | None
    q: mx.array | None
    lengths: list[int]
    writers: list[str]
    valid_lengths: mx.array

    @classmethod
    def nothing(cls, rows: int) -> Proposal:
        """Returns an empty proposal for so many rows."""
        return cls(None, None, [0] * rows, [""] * rows, mx.array([0] * rows, mx.int32))


class Drafter(Protocol):
    """Proposes tokens for the rows of one batch, which it identifies by their index."""

    @property
    def model(self) -> T5 | None:
        """The draft model; None if there is none."""

    def fresh(self) -> Drafter:
        """Returns a drafter of the same kind for another batch, without rows."""

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Adds rows at the end of the batch, without using the device.

        Args:
            sources: source tokens of each row.
            states: the target's encoder output (S, d_model) of each, for a draft that uses it.
        """

    def offers(self) -> Sequence[Sequence[Offer]]:
        """Returns each row's offers: at most one of a draft model, and one of copied tokens."""

    def propose(
        self, committed: Rows, choices: Sequence[Choice], sampling: Sampling, keys: mx.array | None
    ) -> Proposal | None:
        """Guesses the next tokens, without waiting for the device.

        Args:
            committed: tokens of each row so far, the start token first.
            choices: the offer that each row is proposed, and how many of its tokens.
            sampling: settings of the rows.
            keys: (B, T, 2) random keys of the next positions; None if every row is greedy.

        Returns:
            The proposal, or None if it proposes nothing for any row.
        """

    def note(self, committed: Rows) -> None:
        """Takes note of the tokens of each row after the step."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, ascending."""
