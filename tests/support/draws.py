"""Rows that sample, their keys, and how far from its distribution a fair draw may be."""

from functools import cache

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.sampling.draws import Sampling, fold, row_key
from mlx_t5.sampling.processors import Processing
from mlx_t5.settings import Settings

# A statistic may exceed its bound by chance in one run of this many.
FALSE_ALARM = 1e-6


def settings(rows=1, temp=1.0, top_k=0, top_p=1.0, delta=0.0):
    return Sampling.of([Settings(temp=temp, top_k=top_k, top_p=top_p, delta=delta)] * rows)


def collected(temp, top_k, top_p, delta):
    """What rows sample by, of whose settings these are the values."""
    settings = cache(lambda t, k, p, d: Settings(temp=t, top_k=k, top_p=p, delta=d))
    return Sampling.of([settings(*row) for row in zip(temp, top_k, top_p, delta, strict=True)])


def rules_of(penalty, ngram_size, min_tokens, custom, eos):
    """The rules for the texts of rows, of whose settings these are the values."""
    names = ("repetition_penalty", "no_repeat_ngram_size", "min_tokens", "logits_processors")
    rows = zip(penalty, ngram_size, min_tokens, custom, strict=True)
    return Processing.of([Settings(**dict(zip(names, row, strict=True))) for row in rows], eos)


def keys(rows, seed=0):
    return mx.stack([row_key(seed, i) for i in range(rows)])


def many_keys(rows, seed=0):
    """As `keys`, without a graph node a row."""
    base = mx.broadcast_to(row_key(seed, 0), (rows, 2))
    return fold(base, mx.arange(rows), 0)


def total_variation_bound(categories, draws):
    """Empirical TV distance that is exceeded with probability below FALSE_ALARM.

    E[TV] <= sqrt(categories / draws) / 2, and by McDiarmid's inequality
    P(TV > E[TV] + t) <= exp(-2 draws t^2).
    """
    return np.sqrt(categories / draws) / 2 + np.sqrt(np.log(1 / FALSE_ALARM) / (2 * draws))
