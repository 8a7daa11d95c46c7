"""Chooses how many tokens to propose to each row in a step.

If each proposal is accepted with probability alpha, a step with gamma proposals yields
1 + alpha + … + alpha^gamma tokens on average. `Adaptive` chooses the gamma, possibly 0, that gives
the most tokens per second. It learns the seconds of a step by timing the steps (costs.py), and
alpha by counting accepted proposals. All rows of a batch share a step, so the seconds of a step are
compared with the expected tokens of all rows together.

A few proposals say little about alpha, so alpha is given a beta distribution. If `a` proposals were
accepted and `b` rejected, E[alpha^i] = product of (a + j) / (a + b + j) over j = 0, …, i - 1.

delta is the leniency of the target's check (sampling/acceptance.py). Rows learn as follows:

- Greedy rows with delta = 0 learn from each other and from measured times. The number of proposals
  rarely changes their texts (only by rounding).
- All other rows use a fixed table of costs, so that every run of a command gives the same text.
  Sampled rows with delta = 0 learn from the sampled rows of the same call. A row with delta > 0
  learns only from its own proposals, so that other rows cannot change its text.

Symbols: B rows, gamma proposals, N values of gamma that are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from mlx_t5.drafting.costs import NUMBERS, Expected, StepCosts, most_proposals
from mlx_t5.drafting.proposals import NOTHING, Choice, Drafter, Kind, Offer
from mlx_t5.network.exact import WIDTHS
from mlx_t5.settings import AUTO

if TYPE_CHECKING:
    from mlx_t5.engine.rows import Row
    from mlx_t5.network.interface import Target

Offers: TypeAlias = Sequence[Sequence[Offer]]  # of each row: at most one draft and one copy

FIRST = 7  # maximum number of proposals until more than 7 have been accepted
MEMORY = 80.0  # verified proposals after which an old proposal counts 1/e
OTHERS = 20.0  # maximum weight of the prior and of other rows, in proposals
EVIDENCE = 12.0  # number of verified proposals that makes `LEAST_GAIN` apply
LEAST_GAIN = 1.02  # smaller ratios between two estimated speeds are ignored
TRIAL_SHARE = 0.018  # share of the time that may be lost on trials of a draft that does not pay
ONE = [1.0] * len(NUMBERS)  # expected tokens of a step without proposals
CREDIT = 0.3  # credit for trials at first, in regular steps
LEAST_PRICE = 0.06  # minimum price of a trial, in regular steps
MOST_REST = 16  # maximum number of steps before a draft that rests is considered again


@dataclass
class Experience:
    """Counts the proposals of one row, of all greedy rows, or of the sampled rows of a call.

    Attributes:
        accepted: number of accepted proposals of each kind; older proposals count less.
        rejected: number of rejected proposals of each kind; older proposals count less.
        credit: the time that trials of the draft may still lose. The unit is the time of a step
            that does not draft.
        refund: what each token that a trial writes adds to `credit`; 0 outside trials.
        rest: number of next steps that will not draft. The rest ends early if tokens can be copied,
            if the number of rows changes, or if a row can take more proposals than before.
        rest_batch: number of rows when `rest` was set; always 1 with delta > 0.
        rest_room: maximum number of proposals per row when `rest` was set.
    """

    accepted: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    rejected: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    credit: float = CREDIT
    refund: float = 0.0
    rest: int = 0
    rest_batch: int = 0
    rest_room: int = 0

    def expected_tokens(self, kind: Kind, most: int, shared: Experience) -> list[float]:
        """Returns how many tokens a row's step is expected to yield.

        The result has a value for each number of proposals in `NUMBERS`.

        Args:
            kind: the kind of the proposals.
            most: maximum number of proposals.
            shared: the experience of all rows that this row learns from, itself included.
        """
        accepted, rejected = self.accepted[kind], self.rejected[kind]
        a = kind.accepted + max(shared.accepted[kind] - accepted, 0.0)
        b = kind.rejected + max(shared.rejected[kind] - rejected, 0.0)
        scale = min(1.0, OTHERS / (a + b))
        a, b = accepted + scale * a, rejected + scale * b
        tokens, chance = [1.0], 1.0
        for i in range(min(most, max(FIRST, int(a)))):
            chance *= (a + i) / (a + b + i)
            tokens.append(tokens[-1] + chance)
        return [tokens[min(n, len(tokens) - 1)] for n in NUMBERS]

    def decide(
        self, tokens: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]], late: float
    ) -> tuple[int, int]:
        """Returns 1 to draft or else 0, and the index in `NUMBERS` of the number of proposals.

        If drafting is too slow, the draft is still tried now and then, because more of its tokens
        may be accepted by now. A trial uses the number of proposals that loses the least time, and
        starts only if `credit` covers this loss.

        Args:
            tokens: (2, N) expected tokens of a step that only copies, and of a step that drafts,
                for N numbers of proposals.
            seconds: (2, N) expected seconds of these steps.
            late: extra seconds of drafting if the draft first has to read older tokens.
        """
        ways = 1 if tokens[0] == tokens[1] else 2  # 1 if nothing can be drafted
        steps = zip(tokens[:ways], seconds, strict=False)
        speeds = [[t / s for t, s in zip(*step, strict=False)] for step in steps]
        proven = sum(self.accepted.values()) + sum(self.rejected.values()) >= EVIDENCE
        least = max(map(max, speeds)) / (LEAST_GAIN if proven else 1.0)
        _, drafted, n = min(
            (seconds[d][n], d, n)
            for d, row in enumerate(speeds)
            for n, speed in enumerate(row)
            if speed >= least
        )
        self.rest, self.refund = 0, 0.0
        if ways == 1 or drafted:
            return drafted, n
        lost = (s + late - t / speeds[0][n] for t, s in zip(tokens[1], seconds[1], strict=False))
        price, trial = min((p / seconds[0][n], i) for i, p in enumerate(lost))
        price = max(price, LEAST_PRICE)
        self.credit += TRIAL_SHARE
        if self.credit < price:
            self.rest = min(int((price - self.credit) / TRIAL_SHARE), MOST_REST)
            return 0, n
        self.credit -= (seconds[1][trial] + late) / seconds[0][n]
        self.refund = 1 / tokens[0][n]  # the time that a token takes without drafting
        return 1, trial


class Adaptive:
    """Chooses for each row whether to propose copied or drafted tokens, and how many.

    Attributes:
        experience: the experience of all greedy rows.
        of_call: the experience of the sampled rows of a call.
        costs: estimates a step's seconds for greedy rows, from a device's table and measured steps.
        table: estimates a step's seconds for all other rows (sampled, or with delta > 0), from the
            device's table alone.
        shape: the numbers of rows, proposals and draft passes of the step chosen last, so that
            `costs` can learn its seconds; None if `costs` must not learn from that step.
        idle: whether the next step will propose nothing if the rows stay the same.
    """

    def __init__(self, expected: Expected, most: int | None = None) -> None:
        """Starts with expected costs and the maximum number of proposals (None: the default)."""
        most = most_proposals() if most is None else most
        self.costs = StepCosts(expected.seconds, most)
        self.table = StepCosts(partial(expected.seconds, sampled=True), most)
        self.expected, self.experience, self.of_call = expected, Experience(), Experience()
        self.shape: tuple[int, int, int] | None = None
        self.idle = False

    @classmethod
    def of(cls, target: Target, drafter: Drafter | None) -> Adaptive:
        """Returns an `Adaptive` for a target and its drafter."""
        most = WIDTHS[0] - 1 if target.width else None  # whatever width other engines have
        return cls(Expected(target, drafter.model if drafter else None), most)

    def fresh(self) -> Adaptive:
        """Returns an `Adaptive` for a new call; both share what they learn from greedy rows."""
        other = copy(self)
        other.of_call = Experience()
        return other

    def drafts(self, rows: Sequence[Row]) -> bool:
        """Returns whether the draft should read the sources of these new rows now.

        It should not while it rests, if all of these rows share `experience`.
        """
        return not self.experience.rest or not all(row.adapts for row in rows)

    def choose(self, rows: Sequence[Row], offers: Offers) -> list[Choice]:
        """Chooses what each row proposes in the next step: how many tokens, drafted or copied.

        Also sets `shape` and `idle`.
        """
        picks: list[tuple[int, Offer | None]] = [(0, None)] * len(rows)
        greedy: list[int] = []
        drawn: list[int] = []
        self.idle = True
        for i, (row, offered) in enumerate(zip(rows, offers, strict=True)):
            number, delta = row.settings.num_draft, row.settings.delta
            if isinstance(number, int):
                best = max(offered, key=lambda o: (o.kind.alpha, not o.kind.drafted), default=None)
                picks[i], self.idle = (number, best), False
            elif delta:
                self._pick([i], rows, offers, row.experience, self.table, picks)
            else:
                (greedy if row.adapts else drawn).append(i)
        if drawn:
            self._pick(drawn, rows, offers, self.of_call, self.table, picks)
        if greedy:
            self._pick(greedy, rows, offers, self.experience, self.costs, picks)
        choices, late = [], False
        for row, (number, offer) in zip(rows, picks, strict=True):
            length = min(number, row.room)
            if offer and offer.tokens is not None:
                copied = offer.tokens[:length]
                choices.append(Choice(len(copied), 0, copied))
            else:
                choices.append(Choice(length, length) if offer else NOTHING)
                late = late or (length > 0 and offer is not None and offer.unread > 1)
        gamma, passes = (max(column) for column in list(zip(*choices, strict=True))[:2])
        usual = len(greedy) == len(rows) and passes in (0, gamma) and not late
        self.shape = (len(rows), gamma, passes) if usual else None
        return choices

    def _pick(
        self,
        indices: Sequence[int],
        rows: Sequence[Row],
        offers: Offers,
        experience: Experience,
        costs: StepCosts,
        picks: list[tuple[int, Offer | None]],
    ) -> None:
        """Picks one number of proposals for some rows, and the better offer for each of them.

        Args:
            indices: the indices of all greedy rows, all sampled rows, or one row with delta > 0.
            rows: all rows.
            offers: the offers of all rows.
            experience: the experience that these rows share.
            costs: the seconds of steps.
            picks: (number of proposals, offer) of each row; updated.
        """
        # With delta > 0 the number of proposals changes the text, so other rows must not matter.
        size = 1 if rows[indices[0]].settings.delta else len(rows)
        longest = min(max(rows[i].room for i in indices), NUMBERS[-1])
        drafted_only = all(offer.tokens is None for i in indices for offer in offers[i])
        same = experience.rest_batch == size and experience.rest_room >= longest
        if experience.rest and same and drafted_only:
            experience.rest, experience.refund = experience.rest - 1, 0.0
            experience.credit += TRIAL_SHARE
            self.idle = self.idle and experience.rest > 0
            return
        offered = [[ONE, ONE] for _ in indices]  # expected tokens of each row's copy and draft
        best: list[list[Offer | None]] = [[None, None] for _ in indices]
        unread = 0
        for place, i in enumerate(indices):
            own, room = rows[i].experience, rows[i].room
            for offer in offers[i]:
                most = room if offer.tokens is None else min(room, len(offer.tokens))
                tokens = own.expected_tokens(offer.kind, most, experience)
                offered[place][offer.kind.drafted] = tokens
                best[place][offer.kind.drafted] = offer
                unread = max(unread, offer.unread)
        late = self.expected.catching_up(size, unread) if unread > 1 else 0.0
        copying = [sum(column) for column in zip(*(copied for copied, _ in offered), strict=True)]
        either = (map(max, *pair) for pair in offered)
        drafting = [sum(column) for column in zip(*either, strict=True)]
        drafts, n = experience.decide((copying, drafting), costs.seconds(size), late)
        experience.rest_batch, experience.rest_room = size, longest
        if not drafted_only:
            experience.rest = 0  # without copies in the next step, drafting may be better
        self.idle = self.idle and experience.rest > 0
        for i, (copied, drafted), (by_copy, by_draft) in zip(indices, best, offered, strict=True):
            wins = drafts and (not copied or by_draft[n] > by_copy[n])
            picks[i] = NUMBERS[n], drafted if wins else copied

    def note(
        self, row: Row, offers: Sequence[Offer], choice: Choice, written: list[int], accepted: int
    ) -> None:
        """Learns from the outcome of a row's offers.

        An offer of copied tokens is compared with the text, even if the row did not choose it.

        Args:
            row: the row after the step.
            offers: the row's offers in the step.
            choice: the row's choice in the step.
            written: tokens that the step wrote.
            accepted: number of written tokens that were proposals.
        """
        if row.settings.num_draft != AUTO:
            return
        text = written[: len(written) - row.ended]
        shared = self.experience if row.adapts else self.of_call
        learners = (row.experience,) if row.settings.delta else (row.experience, shared)
        learners[-1].credit += learners[-1].refund * len(written)
        for kind, tokens, _ in offers:
            if tokens is not None:  # known without a draft, so judged even if not proposed
                known = min(len(tokens), len(text))
                right = next((i for i in range(known) if tokens[i] != text[i]), known)
                wrong = int(right < known)
            elif choice.passes:
                right = min(accepted, len(written) - 1)  # a step writes one token without a draft
                whole = row.finish_reason == "stop" and choice.length == accepted == len(written)
                wrong = int(right < choice.length and not whole)
            else:
                continue
            for learner in learners:
                fade = (1 - 1 / MEMORY) ** (right + wrong)
                learner.accepted[kind] = learner.accepted[kind] * fade + right
                learner.rejected[kind] = learner.rejected[kind] * fade + wrong
