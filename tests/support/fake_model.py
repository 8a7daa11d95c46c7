"""A target and drafts whose cache is the plain list of the tokens fed to them.

A fake model's logits are a fixed random function of the source and of the
tokens in its cache, so an engine that leaves a wrong token there,
or reads past it, changes the output. Everything is small enough to enumerate.
"""

from functools import lru_cache

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.pooling import Pooling
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.network.interface import WeightsRead

START, EOS = 0, 1


class FakeCache:
    """A cache of rows of slots; None marks slots that were never written."""

    def __init__(self, sources, capacity, beams=1):
        self.sources, self.beams = list(sources), beams  # number of rows of each source
        self.slots = [[None] * capacity for _ in self.sources for _ in range(beams)]
        self.state = []

    def reserve(self, capacity):
        for row in self.slots:
            row += [None] * (capacity - len(row))

    def filter(self, sources):
        self.sources = [self.sources[i] for i in sources]
        self.reorder([i * self.beams + k for i in sources for k in range(self.beams)])

    def reorder(self, rows):
        self.slots = [list(self.slots[i]) for i in rows]  # a row may be requested twice

    def shared(self, beams, capacity):
        return FakeCache(self.sources, capacity, beams)

    def trim(self, source, capacity):
        assert source == max(map(len, self.sources))
        self.slots = [row[:capacity] for row in self.slots]

    def extend(self, other):
        self.sources += other.sources
        self.slots += other.slots
        self.reserve(max(map(len, self.slots)))


class FakeModel:
    """A model with logits (V,) = table(source, tokens so far), limited to the ids of `d2t`."""

    can_decode, pooling, width = True, Pooling(), 0

    def __init__(self, table, vocab_size, d2t=None, **config):
        self.table, self.d2t = lru_cache(maxsize=None)(table), d2t
        shape = (vocab_size, *[1] * 5)  # one layer, one head
        self.config = T5Config(*shape, draft_vocab_size=d2t and len(d2t), **config)
        self.calls = []  # (offsets, tokens) of every decoder pass

    def require_decoder(self, name=""):
        """Does nothing, as it has one."""

    def encode(self, ids, mask=None):
        return ids.astype(mx.float32)[..., None]  # a token is its own state

    def weights_read(self):
        return WeightsRead(12, 5 * 10**8, "float32")  # as for a t5-base

    def cache_memory(self, *counts, **more):
        return 0

    encoder_memory = cache_memory

    def cache(self, encoded, mask=None, capacity=4):
        rows = np.array(encoded[..., 0].astype(mx.int32))
        real = np.ones(rows.shape, bool) if mask is None else np.array(mask, bool)
        sources = [tuple(row[keep].tolist()) for row, keep in zip(rows, real, strict=True)]
        return FakeCache(sources, capacity)

    def decode(self, tokens, cache, offsets):
        tokens, offsets = tokens.tolist(), list(offsets)
        assert len(tokens) == len(cache.slots) == len(offsets)
        self.calls.append((offsets, tokens))
        logits = np.empty((len(tokens), len(tokens[0]), self.config.vocab_size), np.float32)
        sources = [source for source in cache.sources for _ in range(cache.beams)]
        cache.reserve(max(offsets) + len(tokens[0]))
        for b, (row, offset) in enumerate(zip(tokens, offsets, strict=True)):
            slots = cache.slots[b]
            slots[offset : offset + len(row)] = row
            for t in range(len(row)):
                seen = tuple(slots[: offset + t + 1])
                assert None not in seen, "a slot was skipped"
                logits[b, t] = self.table(sources[b], seen)
        return mx.array(logits if self.d2t is None else logits[..., self.d2t])


def normal(seed, source, seen, spread, size):
    """Returns numbers of this standard deviation, fixed by a seed, a source and tokens."""
    words = (seed, *(t + 1 for t in source), 999, *(t + 1 for t in seen))
    return np.random.default_rng(words).normal(0, spread, size).astype(np.float32)


def random_table(vocab_size, seed=0, eos_bias=0.0, spread=1.5):
    """Returns a table of normal logits with standard deviation `spread`."""
    bias = np.float32(eos_bias) * (np.arange(vocab_size) == EOS)
    return lambda source, seen: normal(seed, source, seen, spread, vocab_size) + bias


def good(table, seed=77, noise=0.7):
    """Returns the table of a draft: the target's logits with noise."""

    def draft(source, seen):
        logits = table(source, seen)
        return logits + normal(seed, source, seen, noise, len(logits))

    return draft


def contrary(table):
    """Returns the table of a draft that prefers the tokens that the target finds least likely."""
    return lambda source, seen: -3 * table(source, seen)


def always(token, vocab_size):
    """Returns the table of a draft that always proposes one token: q(token) = 1."""
    logits = np.full(vocab_size, -np.inf, np.float32)
    logits[token] = 0
    return lambda source, seen: logits


def without(table, token):
    """Returns the table of a target that never writes a token: p = 0."""

    def forbidding(source, seen):
        logits = table(source, seen)  # -inf would say that rules for the text forbid it
        return np.where(np.arange(len(logits)) == token, np.float32(-1e4), logits)

    return forbidding


def only(table, ids):
    """Returns a table with only the logits of `ids`; other logits are -inf."""

    def masked(source, seen):
        logits = table(source, seen)
        return np.where(np.isin(np.arange(len(logits)), ids), logits, np.float32(-np.inf))

    return masked


def small(model):
    """Changes a model so that "auto" expects its passes to take no time; returns the model."""
    model.weights_read = lambda: WeightsRead(0, 0, "float32")
    return model


def drafter(table, target, vocab_size=None, d2t=None):
    """Returns a drafter with a fake model; `d2t`: the target's ids of the draft's vocabulary."""
    config = {"eos_token_id": target.config.eos_token_id, "d2t": d2t}
    draft = FakeModel(table, vocab_size or target.config.vocab_size, **config)
    return DraftModel(small(draft), target)


def greedy(model, source, max_tokens):
    """Decodes token by token from the table; returns (tokens without EOS, reason)."""
    seen = [model.config.decoder_start_token_id]
    while len(seen) <= max_tokens:
        token = int(np.argmax(model.table(tuple(source), tuple(seen))))
        if token in model.config.eos_token_ids:
            return seen[1:], "stop"
        seen.append(token)
    return seen[1:], "length"
