"""Samples tokens: computes the distribution that a row samples from, and its random numbers.

Every row has its own random key, so a row's tokens do not depend on the other rows of the batch.

Symbols: B rows, T positions per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_t5.backend import mx

if TYPE_CHECKING:
    from mlx_t5.sampling.processors import Processing
    from mlx_t5.settings import Settings

# The purposes of random numbers at one position of a text; `fold` mixes a purpose into the key.
ACCEPT, OWN, REPLACE = 0, 1, 2
PART = 3  # of a text; `fold` mixes the part's number into the text's key
LEAST_WAITING_TIME = 2.0**-100  # a waiting time of 0 would win the race even with weight 0
CANDIDATES = 1024  # likeliest tokens that top-p considers first; if too few, it considers all
LOG2_E = 1.4426950408889634  # for powers of 2: on x86, exp and softmax take twice as long
BLOCK = 128  # tokens in a block; `sample` chooses a block, then one of its tokens
PER_COLUMN = 8  # numbers in a column of `highest`


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of the B rows of a batch; each array has one entry per row."""

    temp: mx.array  # (B,) float32, 0 = greedy
    top_k: mx.array  # (B,) int32, 0 = off
    top_p: mx.array  # (B,) float32, infinite = off
    min_p: mx.array  # (B,) float32, 0 = off
    delta: mx.array  # (B,) float32
    # From here on Python values, known before MLX's graph is built, so that it omits what no row
    # needs, such as a softmax.
    all_greedy: bool
    any_greedy: bool
    any_lenient: bool  # some row has delta > 0
    most_k: int  # the largest top-k; 0 if no row uses it
    any_top_p: bool
    any_min_p: bool
    candidates: int  # likeliest tokens considered for top-p without top-k; 0 if no row needs them
    processing: Processing | None = None  # logits processors, applied before sampling
    keys: mx.array | None = None  # (B, 2), one key per row; None if every row is greedy

    @classmethod
    def of(
        cls,
        settings: Sequence[Settings],
        processing: Processing | None = None,
        keys: Sequence[mx.array | None] = (),
    ) -> Sampling:
        temp, delta = [s.temp for s in settings], [s.delta for s in settings]
        top_k = [s.top_k if s.temp > 0 else 0 for s in settings]
        top_p = [s.top_p if s.temp > 0 and s.top_p < 1 else mx.inf for s in settings]
        needs_candidates = any(p < 1 for k, p in zip(top_k, top_p, strict=True) if not k)
        all_greedy, row_keys = all(t == 0 for t in temp), None
        if keys and not all_greedy:
            row_keys = mx.stack([mx.zeros(2, mx.uint32) if key is None else key for key in keys])
        return cls(
            mx.array(temp, mx.float32),
            mx.array(top_k, mx.int32),
            mx.array(top_p, mx.float32),
            mx.array([s.min_p for s in settings], mx.float32),
            mx.array(delta, mx.float32),
            all_greedy=all_greedy,
            any_greedy=any(t == 0 for t in temp),
            any_lenient=any(d > 0 for d in delta),
            most_k=max(top_k),
            any_top_p=any(p < 1 for p in top_p),
            any_min_p=any(s.min_p > 0 for s in settings),
            candidates=CANDIDATES if needs_candidates else 0,
            processing=processing,
            keys=row_keys,
        )

    def step_keys(self, positions: Sequence[int], count: int) -> mx.array:
        """Random keys (B, T, 2) for T = `count` positions, row b's from positions[b] on."""
        assert self.keys is not None, "some row is sampled"
        # By position, not by step: a token's random numbers do not depend on who proposed it.
        numbers = mx.array(positions)[:, None] + mx.arange(count)
        return fold(mx.broadcast_to(self.keys[:, None], (*numbers.shape, 2)), numbers, 0)

    def exhaustive(self) -> Sampling:
        """The same settings, except that top-p considers every token of the vocabulary."""
        return replace(self, candidates=2**31 - 1)


def row_key(seed: int, index: int) -> mx.array:
    # Hashed before the index is mixed in, so that seeds and indexes close together differ.
    return fold(mx.random.key(seed), index % 2**32, (index >> 32) % 2**32)


def fold(keys: mx.array, word: int | mx.array, purpose: int) -> mx.array:
    """Derives keys (..., 2) from keys (..., 2), a number `word` and a purpose.

    Each key is hashed, then XORed. The streams are independent, because Threefry, the generator of
    `mx.random`, is a pseudo-random function of its key.
    """
    hashed = _each_key(lambda key: mx.random.split(key)[0], keys)
    word = mx.broadcast_to(mx.array(word).astype(mx.uint32), keys.shape[:-1])
    return hashed ^ mx.stack([mx.full(word.shape, purpose, mx.uint32), word], axis=-1)


def _each_key(draw: Callable[[mx.array], mx.array], keys: mx.array) -> mx.array:
    """Applies `draw`, a function of one key (2,), to keys (..., 2)."""
    for _ in keys.shape[:-1]:
        draw = mx.vmap(draw)
    return draw(keys)


def probabilities(logits: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array | None]:
    """Returns the probabilities that each row samples from, and where they are wrong.

    Applies temperature, then top-k, top-p and min-p, in the order of transformers' logits warpers;
    equal logits at a threshold are all kept. A row with temp = 0 puts all its mass on the token
    with the largest logit; in a tie, on the first one.

    Returns:
        (B, T, V) float32, summing to one over V, and `short` (B, T) bool: whether the likeliest
        `sampling.candidates` tokens do not reach top-p. If so, the probabilities are wrong: repeat
        the call with `Sampling.exhaustive`. None if no entry can be True.
    """
    greedy = (sampling.temp == 0)[:, None, None]
    # Distances to the largest logit are at most 0, so dividing by a small temp never gives +inf.
    distance = logits - mx.max(logits, axis=-1, keepdims=True)
    log2 = distance * (LOG2_E / mx.where(greedy, 1.0, sampling.temp[:, None, None]))
    weights, short = mx.power(2.0, log2), None
    if most := min(max(sampling.most_k, sampling.candidates), logits.shape[-1]):
        weights, short = _filtered(weights, log2, sampling, most)
    if sampling.any_min_p:  # the likeliest token has weight 1
        weights = weights * (weights >= sampling.min_p[:, None, None])
    if sampling.any_greedy:
        weights = mx.where(greedy, one_hot(likeliest(logits), logits.shape[-1]), weights)
    return weights / _total(weights), short


def _filtered(
    weights: mx.array, log2: mx.array, sampling: Sampling, most: int
) -> tuple[mx.array, mx.array | None]:
    """Applies top-k and top-p, with the `most` likeliest tokens; returns `short`, too."""
    top_k, top_p = sampling.top_k[:, None, None], sampling.top_p[:, None, None]
    likely, short = highest(log2, most), None
    # Each row uses its own number of candidates, whatever numbers other rows have.
    first = most - mx.clip(mx.where(top_k > 0, top_k, sampling.candidates), 1, most)
    if sampling.most_k:
        first_of_all = mx.broadcast_to(first, (*likely.shape[:-1], 1))
        least = mx.take_along_axis(likely, first_of_all, axis=-1)
        weights = weights * (log2 >= mx.where(top_k > 0, least, -mx.inf))
    if sampling.any_top_p:
        mass = mx.power(2.0, likely) * (mx.arange(most) >= first)
        # A token stays if the mass of the likelier tokens is below top_p: the nucleus is the
        # smallest set of tokens that reaches top_p, and has at least one token.
        in_front = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        enough = top_p * _total(weights)
        least = mx.min(mx.where(in_front < enough, likely, mx.inf), axis=-1, keepdims=True)
        short = in_front[..., :1] + mass[..., :1] < enough
        weights = weights * (log2 >= mx.where(short, -mx.inf, least))
        short = (short & (top_k == 0) & (top_p < mx.inf))[..., 0]
    return weights, short if most < log2.shape[-1] else None


def _total(weights: mx.array) -> mx.array:
    return mx.cumsum(weights, axis=-1)[..., -1:]  # unlike mx.sum, one order for every B and T


def highest(x: mx.array, count: int) -> mx.array:
    """The `count` largest of the numbers x (..., V), ascending: (..., count)."""
    if PER_COLUMN * count < x.shape[-1]:  # only the columns with the largest maxima are searched
        x = in_blocks(x, -(-x.shape[-1] // PER_COLUMN), -mx.inf)  # (..., PER_COLUMN, columns)
        best = mx.argpartition(-mx.max(x, axis=-2), count - 1, axis=-1)[..., None, :count]
        x = mx.take_along_axis(x, best, axis=-1).flatten(-2)
    return mx.sort(mx.topk(x, count, axis=-1), axis=-1)


def in_blocks(x: mx.array, size: int, filler: float) -> mx.array:
    """Splits x (..., V) into n blocks (..., n, size); `filler` pads the last block."""
    if missing := -x.shape[-1] % size:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=filler)
    return x.reshape(*x.shape[:-1], -1, size)


def is_finite(logits: mx.array) -> mx.array:
    """Whether a token can be chosen (...) from logits (..., V): not if NaN, +inf, or all -inf."""
    return mx.abs(mx.max(logits, axis=-1)) < mx.inf


def likeliest(logits: mx.array) -> mx.array:
    """The tokens (...) int32 with the largest logits (..., V); in a tie, the first one."""
    return mx.argmax(logits, axis=-1).view(mx.int32)  # a view, not a conversion: the same bits


def gather(x: mx.array, tokens: mx.array) -> mx.array:
    """The entries (...) of x (..., V) at tokens (...)."""
    return mx.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def one_hot(tokens: mx.array, vocab_size: int) -> mx.array:
    return (mx.arange(vocab_size) == tokens[..., None]).astype(mx.float32)


def sample(weights: mx.array, keys: mx.array) -> mx.array:
    """Samples tokens (B,) int32 from weights (B, V), which need not sum to one, with keys (B, 2).

    An exponential race, the Gumbel-max trick in another form: with E(x) of mean 1, argmin E(x) /
    weights(x) is a sample in proportion to the weights. It chooses a block of the vocabulary, then
    a token of it, so that about V / `BLOCK` + `BLOCK` random numbers suffice instead of V.
    https://en.wikipedia.org/wiki/Exponential_distribution#Distribution_of_the_index_of_the_minimum
    """
    blocks = in_blocks(weights, BLOCK, 0.0)
    count = blocks.shape[1] + BLOCK + 1
    u = _each_key(lambda key: mx.random.uniform(shape=(count,), key=key), keys)
    of_blocks, of_tokens = mx.split(waiting_times(u), [blocks.shape[1]], axis=-1)
    block = likeliest(blocks.sum(axis=-1) / of_blocks)[:, None]
    chosen = mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    token = block[:, 0] * BLOCK + likeliest(chosen / of_tokens)
    return mx.minimum(token, weights.shape[-1] - 1)  # NaN weights may give a token past V


def waiting_times(u: mx.array) -> mx.array:
    """Exponentially distributed times (B, n) of mean 1, from uniform draws u (B, n + 1)."""
    # A rare token wins a race only with a tiny time, so tiny times must be exact: -log(1-u) takes
    # them from u near 0, where floats are dense; near 1 they are 6e-8 apart. Uniform draws are
    # multiples of 2**-32, which is too coarse, so the last draw of a row adds further bits to all
    # others. It may be shared, as a row practically never has two draws near 2**-32.
    u = u[:, :-1] + u[:, -1:] * 2.0**-32
    return mx.maximum(-mx.log1p(-u), LEAST_WAITING_TIME)


def uniform(keys: mx.array) -> mx.array:
    """Uniform draws on [0, 1), shape (B, T), one for each of the keys (B, T, 2)."""
    return _each_key(lambda key: mx.random.uniform(key=key), fold(keys, 0, ACCEPT))
