"""A model that copies the words of its source and runs into a loop by construction."""

import numpy as np

from fake_model import EOS, FakeModel
from mlx_t5.disk import BUNDLED
from mlx_t5.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(BUNDLED / "target")
V = 3072
PREFIX = "translate English to French: "
TEMPLATE = "translate {source} to {target}: "


def token(word):
    """The token of a word that is one."""
    (token, _) = TOKENIZER.encode(word)
    return token


LONG, ALWAYS, BROKEN = map(token, ("rain", "snow", "bread"))
BEGIN = len(TOKENIZER.encode(PREFIX)) - 1
LIMIT = 8  # tokens of a source in which "rain" does not loop


def looping(source, seen):
    """Copies the source, but writes the word before "rain" and "rain" forever if it is long.

    Before other words of a short source, the word's neighbor is as likely. "snow" always loops;
    a short source with "bread" has NaN.
    """
    words, place = source[BEGIN:-1], len(seen) - 1
    loops = [i for i, t in enumerate(words) if t == ALWAYS or t == LONG and len(words) > LIMIT]
    logits = np.full(V, -30, np.float32)
    if loops and place > loops[0]:
        logits[words[loops[0] - (place - loops[0]) % 2]] = 0
    elif place < len(words):
        logits[[words[place], words[place] + (not loops and place == 0)]] = 0
    else:
        logits[EOS] = 0
    return logits * np.nan if BROKEN in words and len(words) <= LIMIT else logits


def model():
    return FakeModel(looping, V, translation_prefix=TEMPLATE)
