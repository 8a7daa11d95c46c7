"""Evaluates the texts of a model: exact match, chrF, and a few samples to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_t5.errors import shown

ORDERS, BETA = 6, 2  # chrF2: n-grams of up to six characters; recall counts twice
SAMPLES, SAMPLE_CHARACTERS = 3, 100


@dataclass(frozen=True)
class Texts:
    prompts: Sequence[str]
    written: Sequence[str]
    right: Sequence[str]

    @property
    def exact_match(self) -> float:
        return sum(map(self._is_right, range(len(self.right)))) / len(self.right)

    @property
    def chrf(self) -> float:
        return chrf(self.written, self.right)

    @property
    def value(self) -> float:
        return self.chrf + 1e-6 * self.exact_match

    def __str__(self) -> str:
        return f"exact match {self.exact_match:.1%}, chrF {self.chrf:.1f}"

    def samples(self) -> str:
        rows = []
        for i in sorted(range(len(self.right)), key=self._is_right)[:SAMPLES]:
            texts = self.prompts[i], self.written[i], self.right[i]
            prompt, text, right = (shown(text, SAMPLE_CHARACTERS) for text in texts)
            rows.append(f"  {prompt}\n    → {text}")
            rows += [] if self._is_right(i) else [f"    not {right}"]
        return "\n".join(rows)

    def _is_right(self, i: int) -> bool:
        return self.written[i].strip() == self.right[i].strip()


def chrf(written: Sequence[str], right: Sequence[str]) -> float:
    """The chrF2 of all texts together, from 0 to 100 (https://aclanthology.org/W15-3049).

    Character n-grams without white space are counted over all texts. The result equals sacrebleu's.
    """
    precisions, recalls = [], []
    for n in range(1, ORDERS + 1):
        pairs = [(_runs(a, n), _runs(b, n)) for a, b in zip(written, right, strict=True)]
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


def _runs(text: str, n: int) -> Counter[str]:
    text = "".join(text.split())
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))
