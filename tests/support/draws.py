"""Rows that sample, their keys, and how far from its distribution a fair draw may be."""

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.sampling.draws import Sampling, fold, row_key

# A statistic may exceed its bound by chance in one run of this many.
FALSE_ALARM = 1e-6


def settings(rows=1, temp=1.0, top_k=0, top_p=1.0, delta=0.0):
    return Sampling.collect([temp] * rows, [top_k] * rows, [top_p] * rows, [delta] * rows)


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
