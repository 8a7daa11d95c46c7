"""Evaluates what was trained: a model by its texts, a draft by its acceptance and its speed.

The measured speed compares proposers: drafts, and copying from the prompt. Their timed runs and
those of regular decoding alternate.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlx_t5.drafting.named import DRAFTERS
from mlx_t5.engine.rows import Result, total
from mlx_t5.errors import brief
from mlx_t5.timing import Columns, Ratio, interleave, markdown, percent, speed_up

Decode = Callable[[int], list[Result]]

ORDERS, BETA = 6, 2  # chrF2: n-grams of up to six characters; recall counts twice
SAMPLES, SAMPLE_CHARACTERS = 3, 100
NUM_DRAFT = 5  # proposals a step where acceptance is measured, so that evaluations compare
STILL = 0.9  # what falls to no less than this share of what it was stands still
BUDGET_SECONDS = 60.0  # approximate time for measuring
LEAST_TURNS, REPEATS = 4, 3  # a turn decodes one prompt
REGULAR = ""  # the name of regular decoding
NOT_FASTER = "keep {} is reliably faster than regular decoding here"
NEAR = 0.02  # speeds that differ by less than this share count as equal


@dataclass(frozen=True)
class Texts:
    """The greedy texts to held-out prompts, beside the right ones and their mean loss per token."""

    prompts: Sequence[str]
    written: Sequence[str]
    right: Sequence[str]
    loss: float

    @property
    def exact_match(self) -> float:
        return sum(map(self._is_right, range(len(self.right)))) / len(self.right)

    @property
    def chrf(self) -> float:
        return chrf(self.written, self.right)

    @property
    def value(self) -> float:
        return -self.loss

    @property
    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, "exact_match": self.exact_match, "chrf": self.chrf}

    def __str__(self) -> str:
        texts = f"exact match {self.exact_match:.1%}, chrF {self.chrf:.1f}"
        return f"held-out loss {self.loss:.4f}, {texts}"

    def samples(self) -> str:
        rows = []
        for i in sorted(range(len(self.right)), key=self._is_right)[:SAMPLES]:
            texts = self.prompts[i], self.written[i], self.right[i]
            prompt, text, right = (brief(text, SAMPLE_CHARACTERS) for text in texts)
            rows.append(f"  {prompt}\n    → {text}")
            if not self._is_right(i):
                rows.append(f"    not {right}")
        return "\n".join(rows)

    def _is_right(self, i: int) -> bool:
        return self.written[i].strip() == self.right[i].strip()


def chrf(written: Sequence[str], right: Sequence[str]) -> float:
    """The chrF2 of all texts together, from 0 to 100 (https://aclanthology.org/W15-3049).

    Character n-grams without white space are counted over all texts. The result equals sacrebleu's.
    """
    precisions, recalls = [], []
    for n in range(1, ORDERS + 1):
        pairs = [(_ngrams(a, n), _ngrams(b, n)) for a, b in zip(written, right, strict=True)]
        same = sum((a & b).total() for a, b in pairs)
        in_written = sum(a.total() for a, b in pairs if b)
        in_right = sum(b.total() for _, b in pairs)
        if in_written and in_right:
            precisions.append(same / in_written)
            recalls.append(same / in_right)
    if not sum(precisions):
        return 0.0
    precision, recall = (sum(shares) / len(shares) for shares in (precisions, recalls))
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def _ngrams(text: str, n: int) -> Counter[str]:
    text = "".join(text.split())
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


@dataclass(frozen=True)
class Acceptance:
    """Of a draft's proposals, at a fixed number of proposals a step."""

    acceptance: float
    tokens_per_call: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Acceptance:
        # A text without an end usually repeats itself, is by far the longest, and is guessed all or
        # not at all: a few of them would decide which draft is the best.
        ended = [result for result in results if result.finish_reason == "stop"]
        stats = total(ended if 2 * len(ended) >= len(results) else results)
        return cls(stats.acceptance_rate, stats.tokens_per_call)

    @property
    def value(self) -> float:
        return self.acceptance

    @property
    def numbers(self) -> dict[str, float]:
        return vars(self)

    def __str__(self) -> str:
        return f"acceptance {self.acceptance:.1%}, {self.tokens_per_call:.2f} tokens a call"


def needs_prompts(history: Sequence[tuple[float, float]]) -> bool:
    """Whether, since half of the evaluations, the training loss fell but the rejections did not.

    The first evaluation, before the training, has no loss.
    """
    if len(history) < 4:
        return False
    (loss, acceptance), (last_loss, last) = history[len(history) // 2], history[-1]
    return last_loss < STILL * loss and 1 - last > STILL * (1 - acceptance)


@dataclass(frozen=True)
class Proposer:
    """A value of --draft-model, and its speed-up over regular decoding.

    Acceptance and tokens per call are at `NUM_DRAFT` proposals. `most` is the number of tokens per
    call in the measured runs, where the number of proposals adapts: the largest possible speed-up.
    """

    name: str
    acceptance: float | None
    tokens_per_call: float
    measured: Ratio
    most: float

    @property
    def is_faster(self) -> bool:
        """Whether the measured speed-up is plausible, and more than chance."""
        return bool(self.acceptance) and is_reliable(self.measured, self.most)


def is_reliable(speed_up: Ratio, most: float) -> bool:
    """Whether a speed-up is plausible, and more than chance; `most` is its tokens per call."""
    return round(speed_up.low, 2) > 1 and 1 + NEAR < speed_up.value <= most


def measure_proposers(
    decoding: Callable[[str], Decode], accepted: Mapping[str, Acceptance], prompts: int
) -> tuple[list[Proposer], int]:
    """Measures proposers, each by the decoder that `decoding` makes; also returns the turns."""
    names = list(accepted)
    regular = decoding(REGULAR)
    regular(0)
    began = time.perf_counter()
    regular(0)
    share = BUDGET_SECONDS / (len(names) + 1) / (REPEATS + 1) / (time.perf_counter() - began)
    turns = min(prompts, max(LEAST_TURNS, int(share)))
    variants = {REGULAR: regular} | {name: decoding(name) for name in names}
    timed = interleave(variants, turns, REPEATS, lambda results: total(results).decided)
    proposers = []
    for name in names:
        stats = total(result for turn in timed[name].outcomes[-1] for result in turn)
        gain = speed_up(timed[REGULAR], timed[name])
        figures = accepted[name].acceptance, accepted[name].tokens_per_call
        proposers.append(Proposer(name, *figures, gain, stats.tokens_per_call))
    return proposers, turns


def report(proposers: Sequence[Proposer], new: str, prompts: int, public: str | None = None) -> str:
    if public:
        proposers = [p for p in proposers if p.name in (new, *DRAFTERS)]
        proposers = [replace(p, name=public) if p.name == new else p for p in proposers]
        new = public
    columns: Columns = {
        "--draft-model": lambda row: row["name"],
        "acceptance": lambda row: percent(row["acceptance"]),
        "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
        "measured (range)": lambda row: str(row["measured"]),
    }
    regular = Proposer("none", None, 1.0, Ratio(1.0, 1.0, 1.0), 1.0)
    table = markdown(columns, [vars(proposer) for proposer in (regular, *proposers)])
    how = f"Acceptance and tokens/call: {NUM_DRAFT} proposals a step. Measured: {prompts} held-out "
    how += "prompts, one at a time, --num-draft auto, relative to regular decoding."
    return f"{table}\n\n{how}\n\n{advice(proposers, new)}"


def advice(proposers: Sequence[Proposer], new: str) -> str:
    useful = [p for p in proposers if p.is_faster]
    if not useful:
        return NOT_FASTER.format("--draft-model none: no proposer")
    fastest = max(p.measured.value for p in useful)
    near = [p for p in useful if p.measured.value >= (1 - NEAR) * fastest]
    best = min(near, key=lambda p: (p.name == new, -p.measured.value))
    line = f"--draft-model {best.name}, {best.measured} times as fast"
    if best.name in DRAFTERS:
        return f"keep to copying, without a draft: {line}"
    return f"recommended: {line}" if best.name == new else f"keep what you have: {line}"
