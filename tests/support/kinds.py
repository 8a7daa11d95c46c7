"""The cases for which the engine's laws are tested: kinds of drafts, numbers, and settings."""

from functools import lru_cache

import numpy as np

from fake_model import EOS, FakeModel, always, contrary, drafter, good, random_table, small
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.sampling.processors import History, Processing
from mlx_t5.settings import Settings

V = 12
FOLLOWING = 2  # the target mostly repeats a source that begins with this
# The first and the third source are copied while other rows use the draft.
SOURCES = [[FOLLOWING, *range(3, 12)] * 2, [4, 5, 6], [FOLLOWING, 7, 9, 11, 3, 5], [3] * 9, [5]]
# The prediction of each text in the kinds with predictions: nearly right, or wrong.
PREDICTIONS = [
    [FOLLOWING, *range(3, 9), 4, 10, 11, EOS], [], [FOLLOWING, 7, 9, 4, 3], [11, 10, 9] * 3, [5, 6],
]  # fmt: skip
PREDICTED = ("prediction", "prediction or disagrees")
NUMBERS = [4, 2, 1, 6, 3]
WRITTEN = [EOS, 4, 5, 6, 8, 9, 11]  # the tokens of drafts with their own vocabulary
# Seconds of a draft pass, and of a target's pass by its positions, if the number is "auto".
PRICES = {
    "cheap": (0.01, lambda n: 1 + 0.005 * (n - 1)),
    "a GPU": (0.05, lambda n: 1 + 0.4 * ((n - 1) // 5) + 0.01 * n),
    "a CPU": (0.1, lambda n: 0.8 + 0.2 * n),
    "a CPU that pays for every position": (0.1, float),
}


def favor_rising(tokens, logits):
    """Returns logits that depend on the last token and on the number of tokens."""
    bonus = (mx.arange(logits.shape[-1]) > tokens[-1]).astype(mx.float32)
    return logits + bonus * (tokens.shape[0] % 3)


RULES = {
    "penalty": {"repetition_penalty": 1.8},
    "bigrams": {"no_repeat_ngram_size": 2},
    "minimum": {"min_tokens": 6},
    "callable": {"logits_processors": (favor_rising,)},
}
RULES["tokens"] = {"bad_words_ids": [[5, 6], [4]], "suppress_tokens": [3], "max_tokens": 20}
RULES["tokens"] |= {"forced_bos_token_id": 5, "forced_eos_token_id": [EOS]}
RULES["all"] = {**RULES["penalty"], **RULES["bigrams"], **RULES["minimum"], **RULES["callable"]}
SAMPLED = {"temp": 1.0, "top_p": 0.95}
# Row i uses settings i; in the last kind the settings differ between rows.
SAMPLING = {
    "greedy": [{}] * 5,
    "sampled": [SAMPLED] * 5,
    "lenient": [{"delta": 0.3}, {"delta": 0.3, "temp": 0.7, "top_k": 3}] * 3,
    "mixed": [{}, SAMPLED, RULES["all"], SAMPLED | RULES["all"], RULES["bigrams"] | {"delta": 0.2}],
}


def table_of(eos_bias=-1.0):
    """Returns the table of a target that mostly repeats a source that begins with FOLLOWING."""
    random = random_table(V, eos_bias=eos_bias)

    def table(source, seen):
        logits, place = random(source, seen).copy(), len(seen) - 1
        if source[0] == FOLLOWING:
            logits[source[place] if place < len(source) else EOS] += 4
        return logits

    return table


def drafters(target, table=None):
    """Returns every kind of draft and drafter; drafts disagree with the target and with copies."""
    table = table or random_table(V, eos_bias=-1.0)
    good_draft, contrary_draft = drafter(good(table), target), drafter(contrary(table), target)
    own_vocabulary = drafter(good(table), target, d2t=WRITTEN)
    target.encoder = object()
    sharing = small(FakeModel(good(table), V))  # must not encode
    sharing.shares_with, sharing.encode = target, None
    return {
        "none": (None, None),
        "good": (good_draft, None),
        "the target itself": (drafter(target.table, target), None),
        "disagrees everywhere": (contrary_draft, None),
        "always the same": (drafter(always(8, V), target), None),
        "always ends": (drafter(always(EOS, V), target), None),
        "fewer ids": (drafter(lambda *args: table(*args)[: V - 3], target, V - 3), None),
        "own vocabulary": (own_vocabulary, None),
        "shared encoder": (DraftModel(sharing, target), None),
        "copy": (None, SourceCopy()),
        "copy or good": (good_draft, SourceCopy()),
        "copy or own vocabulary": (own_vocabulary, SourceCopy()),
        "copy or disagrees": (contrary_draft, SourceCopy()),
        "prediction": (None, None),
        "prediction or disagrees": (contrary_draft, None),
    }


def predictions_of(kind):
    """Returns the prediction for each source; it is empty if the kind has no predictions."""
    return PREDICTIONS if kind in PREDICTED else [[]] * len(SOURCES)


class PassClock:
    """A clock that counts fixed seconds for the passes of fake models.

    Args:
        passes: pairs of a model and a function from a pass's positions in all rows to seconds.
    """

    def __init__(self, *passes):
        self.passes, self.now = passes, 0.0
        self.counted = [len(model.calls) for model, _ in passes]

    def __call__(self):
        for i, (model, seconds) in enumerate(self.passes):
            if len(model.calls) < self.counted[i]:  # a test has cleared the calls
                self.counted[i] = 0
            for _, tokens in model.calls[self.counted[i] :]:
                self.now += seconds(len(tokens) * len(tokens[0]))
            self.counted[i] = len(model.calls)
        return self.now


def decoder_of(target, kind, number=5):
    """Returns a decoder with a kind of drafts; `number`: per step, or a price for "auto"."""
    draft, copy = kind
    if number not in PRICES:
        return SpeculativeDecoder(target, draft, None, number, copy=copy)
    draft_pass, verify = PRICES[number]
    passes = [(target, verify)]
    if draft:
        passes.append((draft.model, lambda _: draft_pass))
    clock = PassClock(*passes)
    return SpeculativeDecoder(target, draft, None, "auto", copy=copy, clock=clock)


def rows(sampling="greedy", numbers=NUMBERS, max_tokens=20, sources=SOURCES, kind="none"):
    """Returns a row for each source, with the settings of a kind."""
    specs = zip(sources, SAMPLING[sampling], numbers, predictions_of(kind), strict=False)
    result = []
    for i, (source, settings, number, prediction) in enumerate(specs):
        own = Settings(max_tokens, num_draft=number, **settings)
        result.append(Row(list(source), own, row_key(3, i), prediction=prediction))
    return result


def processed(table, rules):
    """Returns the table of a model whose logits are processed by the rules of the settings."""
    processing = Processing([Settings(**rules)], [EOS])

    def new(source, seen):
        logits = mx.array(table(source, seen))[None, None]
        return np.array(processing(History.align([seen]), logits, [1]))[0, 0]

    return lru_cache(maxsize=None)(new) if rules else table
