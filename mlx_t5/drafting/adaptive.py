"""`num_draft="auto"`: as many proposals as are expected to pay.

The gamma with the largest speed-up S (theory.py) is proposed. Costs are measured (costs.py); alpha
is estimated while decoding, for each task prefix and kind of proposal.

Greedy rows write the same text whatever is proposed, so they learn from each other. What a sampled
row writes depends on its proposals. It takes the numbers that suit the priors and keeps them, so
its text does not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from mlx_t5.backend import cpu_only
from mlx_t5.drafting.costs import Costs, longest, measure
from mlx_t5.drafting.draft_model import Drafter, Limits, Proposal
from mlx_t5.drafting.source_copy import PREDICTIONS
from mlx_t5.drafting.theory import expected_tokens
from mlx_t5.network.exact import ExactTarget
from mlx_t5.network.exactness import LONGEST_AUTO
from mlx_t5.network.interface import Seq2Seq
from mlx_t5.settings import NUM_DRAFT_ON_CPU, NUM_DRAFT_ON_GPU

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row

# Alpha before anything was verified, and how many proposals that is worth, by their kind.
PRIORS = {
    "draft": (0.85, 5.0),
    "copy": (0.85, 5.0),
    "weak copy": (0.25, 3.0),
    "first copy": (0.4, 3.0),  # near 0.9 where texts are corrected, near 0.1 where translated
    "prediction": (0.85, 5.0),
    "weak prediction": (0.25, 3.0),
    "first prediction": (0.85, 3.0),  # callers may be wrong
}
MEMORY = 80.0  # verified proposals after which an old one counts 1/e
LEAST_SPEEDUP = 1.05  # estimates are not exact enough to act on less
EXPLORATION_SHARE = 0.03  # of the time, lost to drafts that are not expected to pay
STEPS_BETWEEN_LOOKS = 4  # for copies, where they are not expected to pay


@dataclass
class Estimate:
    """A running estimate of alpha for one task and kind of proposal.

    Attributes:
        verified: weight of the proposals verified; in a step, those up to the first rejected one.
        accepted: weight of those that were accepted.
        idle_steps: steps in a row in which none was proposed.
    """

    verified: float = 0.0
    accepted: float = 0.0
    idle_steps: int = 0

    def add(self, verified: int, accepted: int) -> None:
        """Takes the outcome of a step into account."""
        fade = (1 - 1 / MEMORY) ** verified
        self.verified = self.verified * fade + verified
        self.accepted = self.accepted * fade + accepted

    def alpha(self, kind: str) -> float:
        """The estimate, drawn towards the prior while few have been verified."""
        prior, weight = PRIORS[kind]
        return (weight * prior + self.accepted) / (weight + self.verified)


class Adaptive:
    """Chooses how many tokens of each kind a row may be proposed."""

    def __init__(
        self, measure: Callable[[], Costs], kinds: Sequence[str], most: int | None = None
    ) -> None:
        """Starts with the priors.

        Args:
            measure: returns the costs of steps; called once, when they are first needed.
            kinds: the kinds of proposals there are, see `PRIORS`.
            most: proposals a row at most; None is what suits the device.
        """
        self._measure, self.kinds = measure, kinds
        self._longest = longest() if most is None else most
        self._estimates: dict[tuple[tuple[int, ...], str], Estimate] = {}
        self._tables: dict[tuple[bool, int], list[float]] = {}

    @classmethod
    def of(cls, target: Seq2Seq, drafter: Drafter | None, costs: Costs | None = None) -> Adaptive:
        """For a target and what drafts for it.

        Args:
            target: the model that verifies; exact decoding has room for `LONGEST_AUTO` proposals.
            drafter: where proposals come from; None if nothing is proposed.
            costs: of steps; None measures them when they are first needed.
        """
        draft, kinds = (drafter.model, drafter.kinds) if drafter else (None, ())
        most = LONGEST_AUTO if isinstance(target, ExactTarget) else None
        return cls(lambda: costs or measure(target, draft), kinds, most)

    @cached_property
    def costs(self) -> Costs:
        """Costs of steps on this machine."""
        return self._measure()

    @cached_property
    def fixed(self) -> dict[str, int]:
        """The most proposals of each kind for a sampled row, whatever rows are beside it."""
        return self._best({kind: PRIORS[kind][0] for kind in (*self.kinds, *PREDICTIONS)}, rows=1)

    def limits(self, task: tuple[int, ...], rows: int, predicted: bool = False) -> dict[str, int]:
        """The most proposals of each kind for the greedy rows of a task in the next step.

        Args:
            task: the task prefix of the prompts.
            rows: B.
            predicted: whether they have predictions.

        Returns:
            Numbers by kind. A kind that is missing need not be looked for.
        """
        kinds = (*self.kinds, *PREDICTIONS) if predicted else self.kinds
        estimates = {kind: self._estimate(task, kind) for kind in kinds}
        limits = self._best({kind: e.alpha(kind) for kind, e in estimates.items()}, rows)
        for kind, estimate in estimates.items():
            estimate.idle_steps = 0 if limits[kind] else estimate.idle_steps + 1
        if limits.get("draft") == 0:
            limits["draft"] = self._trial(estimates["draft"], rows)
        idle = [e.idle_steps for kind, e in estimates.items() if kind != "draft"]
        if idle and min(idle) % STEPS_BETWEEN_LOOKS:
            return {kind: n for kind, n in limits.items() if kind == "draft"}
        return limits

    def note(self, row: Row, proposal: Proposal, i: int, written: list[int], accepted: int) -> None:
        """Learns from a step of a row, if it is greedy.

        Args:
            row: the row, after the step.
            proposal: of the step.
            i: the row's place in the batch.
            written: tokens that the step wrote.
            accepted: how many of them were proposals.
        """
        if not row.adapts:
            return
        if proposal.writers[i] == "draft" and proposal.lengths[i]:
            ended = row.finish_reason == "stop"
            counts = count_verified(proposal.lengths[i], accepted, len(written), ended)
            self.learn(row.task, "draft", *counts)
        copy = proposal.copies[i]
        if copy:  # known, whether it was proposed or not
            text = written[: len(written) - row.ended]
            self.learn(row.task, copy.kind, *compare(copy.tokens, text))

    def learn(self, task: tuple[int, ...], kind: str, verified: int, accepted: int) -> None:
        """Takes into account how many proposals of a kind were verified, and how many accepted."""
        self._estimate(task, kind).add(verified, accepted)

    def _estimate(self, task: tuple[int, ...], kind: str) -> Estimate:
        return self._estimates.setdefault((task, kind), Estimate())

    def _best(self, alphas: dict[str, float], rows: int) -> dict[str, int]:
        """By kind, the number with the largest S; 0 if that is too small or drafting is better."""
        best = {kind: self._largest_speedup(kind, alpha, rows) for kind, alpha in alphas.items()}
        least = max(LEAST_SPEEDUP, best.get("draft", (0, 0))[0])
        return {kind: gamma if speedup >= least else 0 for kind, (speedup, gamma) in best.items()}

    def _largest_speedup(self, kind: str, alpha: float, rows: int) -> tuple[float, int]:
        """Returns the largest S with a proposal or more, and the gamma that reaches it."""
        costs = enumerate(self._costs(kind == "draft", rows), 1)
        return max((expected_tokens(alpha, n) / cost, n) for n, cost in costs)

    def _costs(self, drafted: bool, rows: int) -> list[float]:
        """Costs of a step with 1, 2, … proposals, relative to a regular step; worked out once."""
        if (drafted, rows) not in self._tables:
            verify, draft = self.costs.verify, drafted * self.costs.draft_pass(rows)
            steps = [g * draft + verify(rows, g + 1) for g in range(1, self._longest + 1)]
            self._tables[drafted, rows] = [step / verify(rows, 1) for step in steps]
        return self._tables[drafted, rows]

    def _trial(self, estimate: Estimate, rows: int) -> int:
        """How many tokens to draft though that is not expected to pay: 0 if it is too early to.

        Where it nearly pays it costs little, so it is tried often.
        """
        speedup, gamma = self._largest_speedup("draft", estimate.alpha("draft"), rows)
        price = (LEAST_SPEEDUP - speedup) * self._costs(True, rows)[gamma - 1]  # in regular steps
        if estimate.idle_steps * EXPLORATION_SHARE < price:
            return 0
        estimate.idle_steps = 0
        return gamma if self._largest_speedup("draft", 1.0, rows)[0] >= LEAST_SPEEDUP else 0


def default_num_draft() -> int:
    """How many proposals a step has on this device where nobody says how many."""
    return NUM_DRAFT_ON_CPU if cpu_only() else NUM_DRAFT_ON_GPU


def proposal_limits(rows: Sequence[Row], drafter: Drafter, adaptive: Adaptive) -> list[Limits]:
    """How many tokens of each kind each row of a batch may be proposed in the next step.

    Args:
        rows: B rows.
        drafter: where the proposals come from.
        adaptive: chooses for rows whose num_draft is "auto".
    """
    limits: list[Limits] = []
    learned = cache(partial(adaptive.limits, rows=len(rows)))
    for row in rows:
        # One token a step is the target's own, so a row with r tokens to go can use r - 1.
        remaining = row.settings.max_tokens - row.decided - 1
        num_draft = row.settings.num_draft
        if num_draft is None:
            num_draft = default_num_draft()
        if isinstance(num_draft, int):
            limit = dict.fromkeys(drafter.default_kinds, num_draft)
        elif not row.adapts:
            limit = adaptive.fixed
        else:
            limit = learned(row.task, predicted=bool(row.prediction))
        usable = {kind: min(n, remaining) for kind, n in limit.items()}
        limits.append(usable if remaining and num_draft else {})
    return limits


def count_verified(proposed: int, accepted: int, written: int, ended: bool) -> tuple[int, int]:
    """What a step tells about alpha.

    What counts is whether a proposal made the step longer. A proposal behind the end of the text is
    as good as rejected. The end token itself would have come without it, so it does not count.

    Args:
        proposed: how many tokens.
        accepted: how many of them are part of the text.
        written: tokens that the step wrote, the target's own included.
        ended: whether they ended the text.

    Returns:
        How many proposals were verified, and how many of them made the step longer.
    """
    useful = min(accepted, written - 1)
    if ended and proposed == accepted == written:
        return useful, useful
    return useful + (proposed > useful), useful


def compare(copy: Sequence[int], written: Sequence[int]) -> tuple[int, int]:
    """What `count_verified` says of tokens known on the host, whether they were proposed or not.

    Args:
        copy: the tokens.
        written: what the step wrote, without the end token.
    """
    known = min(len(copy), len(written))
    accepted = next((i for i in range(known) if copy[i] != written[i]), known)
    return accepted + (accepted < known), accepted
