"""The proposals of a step, and the interface of a drafter.

A batch has two sources of proposals: a draft model (draft_model.py) computes tokens, and a drafter
knows tokens without a model, as `SourceCopy` does (source_copy.py). The target checks all of them,
so a poor source only costs time: the output stays correct. In each step, `Adaptive.choose` selects
one of the two for each row, and the number of its tokens (adaptive.py).

A new drafter needs one file with a `Kind` and a `Drafter`.

Symbols: gamma proposals; delta leniency of the target's check (sampling/acceptance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_t5.backend import mx
from mlx_t5.sampling.draws import one_hot

Rows = Sequence[Sequence[int]]  # tokens of each row


@dataclass(frozen=True)
class Kind:
    """A kind of proposals with a common acceptance rate.

    Attributes:
        name: the kind's name, for messages and tests.
        accepted: number of accepted proposals with which the estimate of the rate starts.
        rejected: number of rejected proposals with which the estimate of the rate starts.
    """

    name: str
    accepted: float
    rejected: float

    @property
    def alpha(self) -> float:
        """The acceptance rate that is assumed before the first proposal of this kind."""
        return self.accepted / (self.accepted + self.rejected)


@dataclass(frozen=True)
class Copy:
    """Tokens that a drafter proposes for a row; empty if it proposes nothing."""

    kind: Kind
    tokens: Sequence[int]


class Drafter(Protocol):
    """Proposes tokens that are known without a model, for the rows of one batch.

    A row is identified by its index in the batch.
    """

    def empty(self) -> Drafter:
        """Returns a drafter of the same kind without rows, for another batch."""

    def insert(self, sources: Rows, predictions: Rows) -> None:
        """Adds rows at the end of the batch.

        Args:
            sources: source tokens of each row.
            predictions: tokens of the text that the caller expects; empty if there is none.
        """

    def propose(self) -> Sequence[Copy]:
        """Returns the tokens that may come next in each row."""

    def update(self, tokens: Rows) -> None:
        """Tells the drafter the tokens of each row after a step, the start token first."""

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps only the rows with these indices, which are ascending."""


@dataclass
class Proposal:
    """The proposals of all rows for one step.

    Attributes:
        tokens: int32 (rows, gamma), where gamma is the largest of `lengths`; a row's entries past
            its own length are padding. None if gamma is 0.
        q: (rows, gamma, vocabulary) probabilities that the tokens were sampled from; None if no row
            has delta > 0, or if all proposals are deterministic: q(x) = 1.
        lengths: number of proposals of each row, without padding.
        origins: origin of each row's proposals, if it has any: "draft" or "copy".
        valid_lengths: int32, each row's number of proposals before the draft's first non-finite
            logits; only these may be accepted. The logits are not checked if all rows are greedy
            with delta = 0, as the target then accepts only tokens that it chooses itself.
    """

    tokens: mx.array | None
    q: mx.array | None
    lengths: list[int]
    origins: list[str]
    valid_lengths: mx.array

    @classmethod
    def nothing(cls, rows: int) -> Proposal:
        """Returns a proposal without tokens for `rows` rows."""
        return cls(None, None, [0] * rows, [""] * rows, mx.array([0] * rows, mx.int32))

    def with_copies(self, copies: Rows) -> Proposal:
        """Returns this proposal, but the rows with copied tokens propose these instead."""
        lengths = [len(copy) for copy in copies]
        gamma = max(lengths)
        tokens = mx.array([[*copy, *[0] * (gamma - len(copy))] for copy in copies], mx.int32)
        valid, origins = mx.array(lengths, mx.int32), ["copy"] * len(lengths)
        if self.tokens is None:
            return Proposal(tokens, None, lengths, origins, valid)
        gamma = max(gamma, self.tokens.shape[1])
        is_copy = mx.array([length > 0 for length in lengths])
        tokens = mx.where(is_copy[:, None], _padded(tokens, gamma), _padded(self.tokens, gamma))
        q = self.q
        if q is not None:
            certain = one_hot(tokens, q.shape[-1])
            q = mx.where(is_copy[:, None, None], certain, _padded(q, gamma))
        pairs = zip(lengths, self.lengths, strict=True)
        origins = ["copy" if length else "draft" for length in lengths]
        valid = mx.where(is_copy, valid, self.valid_lengths)
        return Proposal(tokens, q, [copied or drafted for copied, drafted in pairs], origins, valid)


def _padded(array: mx.array, gamma: int) -> mx.array:
    """Pads an array (rows, positions, …) to gamma positions."""
    return mx.pad(array, [(0, 0), (0, gamma - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
