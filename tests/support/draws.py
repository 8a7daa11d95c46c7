"""Makes settings and keys of sampled rows, and checks the distribution of drawn tokens."""

import numpy as np

from fake_model import EOS
from mlx_t5.backend import mx
from mlx_t5.sampling.draws import Sampling, fold, row_key
from mlx_t5.sampling.processors import Processing
from mlx_t5.settings import Settings

# The probability with which a statistic may exceed its bound by chance.
FALSE_ALARM = 1e-6


def settings(rows=1, **values):
    """Returns the sampling parameters of rows with the same settings; `temp` is 1 by default."""
    return mixed({"temp": 1.0} | values, times=rows)


def mixed(*rows, times=1):
    """Returns the sampling parameters of rows, each with its own settings."""
    return Sampling.of([Settings(**row) for row in rows] * times)


def rules(*rows, eos=(EOS,)):
    """Returns the rules that the texts of rows with the given settings have to follow."""
    settings = [Settings(**row) for row in rows]
    return Processing(settings, eos) if any(row.processes_logits for row in settings) else None


def keys(rows, seed=0):
    return mx.stack([row_key(seed, i) for i in range(rows)])


def position_keys(rows, positions, seed=0):
    """Returns the random keys (rows, positions, 2) of one step."""
    row_keys = mx.broadcast_to(many_keys(rows, seed)[:, None], (rows, positions, 2))
    return fold(row_keys, mx.arange(positions), 0)


def many_keys(rows, seed=0):
    """Returns the same random keys as `keys`, but in one operation of MLX for all rows."""
    base = mx.broadcast_to(row_key(seed, 0), (rows, 2))
    return fold(base, mx.arange(rows), 0)


def total_variation_bound(p, draws):
    """Returns the empirical TV distance that is exceeded with probability below FALSE_ALARM.

    A frequency has the variance p (1 - p) / draws, so E[TV] <= sum sqrt(p (1 - p) / draws) / 2, and
    by McDiarmid's inequality P(TV > E[TV] + t) <= exp(-2 draws t^2).
    """
    p = np.array(list(p))
    mean = np.sqrt(p * (1 - p) / draws).sum() / 2
    return mean + np.sqrt(np.log(1 / FALSE_ALARM) / (2 * draws))


def check_draws(tokens, p):
    """Asserts that the frequencies of tokens agree with the probabilities `p`."""
    seen = np.bincount(np.array(tokens), minlength=len(p)) / len(tokens)
    assert np.abs(seen - p).sum() / 2 < total_variation_bound(p, len(tokens))
