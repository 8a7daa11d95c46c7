"""Examples for both tasks, drawn from the grammar by seed, with a held-out split by hash.

Whether an English sentence is held out depends on its own bytes alone, so no sentence is ever in
both parts, whatever the seed; a corrupted sentence goes with the sentence it came from.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from demo.recipe import errors, grammar

TRANSLATE = "translate English to French: "
FIX = "fix grammar: "
DEFAULT_SENTENCE = (
    "Let's go to the store and buy some groceries including eggs, avocadoes, and bread."
)
HELD_OUT_OF_256 = 6
TRANSLATED_SHARE = 0.6
SHARES = {"translate": 1.0, "fix": 0.0}  # of translations in the stream of one task


@dataclass(frozen=True)
class Example:
    """A prompt with its one right answer."""

    task: str
    source: str
    target: str


def is_held_out(english: str) -> bool:
    """True for sentences kept out of training: about 2.3 %, and that of the default prompt."""
    digest = hashlib.sha256(english.encode()).digest()
    return digest[0] < HELD_OUT_OF_256 or english == DEFAULT_SENTENCE


def examples(
    seed: int | str, held_out: bool = False, translated: float = TRANSLATED_SHARE
) -> Iterator[Example]:
    """An endless stream of examples of one side of the split; equal seeds give equal streams.

    Args:
        seed: Start of the random source.
        held_out: Which side of the split.
        translated: Share of the translation task; the rest corrects grammar.
    """
    rng = random.Random(f"examples {seed}")
    while True:
        pair = grammar.sample(rng)
        if is_held_out(pair.en) != held_out:
            continue
        if rng.random() < translated:
            yield Example("translate", TRANSLATE + pair.en, pair.fr)
        else:
            yield Example("fix", FIX + errors.corrupt(rng, pair.marked), pair.en)


def held_out(task: str, seed: int | str) -> Iterator[Example]:
    """An endless stream of held-out examples of one task."""
    return examples(seed, held_out=True, translated=SHARES[task])
