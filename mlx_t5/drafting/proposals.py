"""What a drafter is, and what it offers and proposes.

A drafter guesses the next tokens of every row of a batch; the target checks them. Whatever it
proposes, the output stays correct: a poor drafter only costs time. A step asks it for `offers`,
chooses how many tokens of which to take (adaptive.py), and has it `propose` those.

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
    """Proposals that are about equally good.

    Attributes:
        name: for messages and tests.
        accepted: how many are taken to have been accepted before any was seen.
        rejected: how many are taken to have been rejected.
        writer: who is said to have written their tokens: "draft" or "copy".
        drafted: whether each costs a pass of a draft model.
    """

    name: str
    accepted: float
    rejected: float
    writer: str = "copy"
    drafted: bool = False

    @property
    def alpha(self) -> float:
        """The probability that one is accepted, before any was seen."""
        return self.accepted / (self.accepted + self.rejected)


class Offer(NamedTuple):
    """What a row may be proposed.

    Attributes:
        kind: of proposal.
        tokens: if the host knows them; None if a draft is to be asked.
        unread: tokens of the row that the draft has yet to read, besides the last one.
    """

    kind: Kind
    tokens: Sequence[int] | None = None
    unread: int = 0

    def most(self, room: int) -> int:
        """How many tokens of it fit into this room."""
        return room if self.tokens is None else min(room, len(self.tokens))

    def first(self, number: int) -> Choice:
        """At most so many tokens of it."""
        return Choice(self, self.most(number))


class Choice(NamedTuple):
    """How many tokens of an offer a row is proposed."""

    offer: Offer | None = None
    length: int = 0

    @property
    def drafted(self) -> int:
        """Passes of the draft that it takes."""
        return self.length if self.offer and self.offer.kind.drafted else 0


NOTHING = Choice()


@dataclass
class Proposal:
    """What a drafter proposes for one step.

    Attributes:
        tokens: (B, gamma) int32; a row's entries past its length are padding. None if gamma is 0.
        q: (B, gamma, V) probabilities the tokens were drawn from, where a row is lenient; None if
            the proposals are deterministic, q(x) = 1.
        lengths: how many proposals of each row are real.
        writers: who proposed, "draft" or "copy" a row.
        valid_lengths: (B,) int32, how many of them count: those before logits that were not finite,
            which matters only where a token that is not the target's own may be kept.
    """

    tokens: mx.array | None
    q: mx.array | None
    lengths: list[int]
    writers: list[str]
    valid_lengths: mx.array

    @classmethod
    def nothing(cls, rows: int) -> Proposal:
        """No proposal for any of the rows."""
        return cls(None, None, [0] * rows, [""] * rows, mx.array([0] * rows, mx.int32))


class Drafter(Protocol):
    """Proposes tokens for the rows of one batch, which are known by their place."""

    @property
    def model(self) -> T5 | None:
        """The model that is asked, None if there is none."""

    def fresh(self) -> Drafter:
        """Returns a drafter of the same kind for another batch, without rows."""

    def insert(self, sources: Rows, states: Sequence[mx.array] | None = None) -> None:
        """Adds rows at the end of the batch, without using the device.

        Args:
            sources: source tokens of each row.
            states: what the target's encoder made of each (S, d_model), for a draft that uses it.
        """

    def offers(self) -> Sequence[Sequence[Offer]]:
        """What each row may be proposed next; at most one offer of a draft, and one of others."""

    def propose(
        self, committed: Rows, choices: Sequence[Choice], sampling: Sampling, keys: mx.array | None
    ) -> Proposal | None:
        """Guesses what follows, without waiting for the device.

        Args:
            committed: tokens of each row so far, the start token first.
            choices: how many tokens of which of its offers each row is proposed.
            sampling: settings of the rows.
            keys: (B, T, 2) of the next positions; None if every row is greedy.

        Returns:
            The proposal, or None if no row is proposed anything.
        """

    def note(self, committed: Rows) -> None:
        """Takes note of the tokens of each row after the step."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, ascending."""
