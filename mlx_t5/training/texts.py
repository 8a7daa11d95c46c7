"""How well a model writes what it should: exact match and chrF, and a few texts to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_t5.errors import shown

ORDERS, BETA = 6, 2  # chrF2: runs of up to six characters, recall counts twice
SAMPLES, SAMPLE_CHARACTERS = 3, 100


@dataclass(frozen=True)
class Texts:
    """What a model wrote.

    Attributes:
        prompts: to which.
        written: its texts.
        right: what it should have written.
    """

    prompts: Sequence[str]
    written: Sequence[str]
    right: Sequence[str]

    @property
    def exact_match(self) -> float:
        """The share of texts that are exactly right, apart from white space around them."""
        pairs = zip(self.written, self.right, strict=True)
        return sum(a.strip() == b.strip() for a, b in pairs) / len(self.right)

    @property
    def chrf(self) -> float:
        """See `chrf`."""
        return chrf(self.written, self.right)

    @property
    def value(self) -> float:
        """By which the best model is chosen: chrF, and exact match where that is equal."""
        return self.chrf + 1e-6 * self.exact_match

    def __str__(self) -> str:
        return f"exact match {self.exact_match:.1%}, chrF {self.chrf:.1f}"

    def samples(self) -> str:
        """A few of the texts, wrong ones first, and what they should be."""
        order = sorted(range(len(self.right)), key=lambda i: self.written[i] == self.right[i])
        rows = []
        for i in order[:SAMPLES]:
            texts = self.prompts[i], self.written[i], self.right[i]
            prompt, text, right = (shown(text, SAMPLE_CHARACTERS) for text in texts)
            rows.append(f"  {prompt}\n    → {text}" + f"\n    not {right}" * (text != right))
        return "\n".join(rows)


def chrf(written: Sequence[str], right: Sequence[str]) -> float:
    """chrF2 of all texts together, 0 to 100 (https://aclanthology.org/W15-3049).

    The number is sacrebleu's: runs of characters without white space, counted over all texts.
    """
    scores = []
    for n in range(1, ORDERS + 1):
        ours, theirs, same = 0, 0, 0
        for text, reference in zip(written, right, strict=True):
            a, b = _runs(text, n), _runs(reference, n)
            ours, theirs, same = ours + a.total(), theirs + b.total(), same + (a & b).total()
        if ours and theirs:
            precision, recall = same / ours, same / theirs
            total = BETA**2 * precision + recall
            scores.append((1 + BETA**2) * precision * recall / total if total else 0.0)
    return 100 * sum(scores) / len(scores) if scores else 0.0


def _runs(text: str, n: int) -> Counter[str]:
    """The runs of n characters of a text, white space left out."""
    text = "".join(text.split())
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))
