"""Decides which proposals are kept, and which token replaces a rejected one.

All functions are pure functions of small arrays, without a model or a state.

    delta = 0             the target chooses its own token at each position; a proposal x is kept
                          if it is that token, and is replaced by that token otherwise
    delta > 0, temp > 0   x is kept with probability min(1, (1 - delta) p(x)/q(x) + delta);
                          a rejected x is replaced by a sample of max(0, p - q), normalized
    delta > 0, temp = 0   x is kept if p(x) >= (1 - delta) max p;
                          a rejected x is replaced by argmax p

With delta = 0 the text is the target's own: greedy, or sampled from its distribution. The random
numbers at a position depend only on the position and the row's key. Draft and target use the same
numbers at a position, so they mostly sample the same token (Gumbel sampling of Daliri et al.,
https://arxiv.org/abs/2408.07978). A seed gives the same text with any draft, with any number of
proposals, and without a draft, because every token is the one that the target samples.

The rules for delta > 0 relax those of Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen
et al. (https://arxiv.org/abs/2302.01318). With temp > 0, the token at each drafted position
has the distribution (1 - delta) p + delta q. When every proposal is kept, the target adds one more
token from p.

Symbols: B rows, gamma proposals per row, T = gamma + 1 positions, V vocabulary; delta leniency,
from 0 (lossless) to 1; p target and q draft probabilities. With temp > 0, temperature, top-k, top-p
and min-p have been applied to p and q. A deterministic proposal (made by a greedy draft, or copied
from a text) has q(x) = 1. In the code, q is None if no proposal was sampled or every delta is 0.
"""

from __future__ import annotations

from mlx_t5.backend import mx
from mlx_t5.sampling.draws import (
    OWN,
    REPLACE,
    Sampling,
    fold,
    is_finite,
    likeliest,
    one_hot,
    probabilities,
    sample,
    uniform,
)

# A residual with less mass is rounding noise of two equal distributions.
NEGLIGIBLE_MASS = 1e-6
# Stands for the target's own token if no token can be chosen from the logits: `draws.is_finite`.
NO_TOKEN = -1
# Stands for the number of proposals kept if top-p needs more candidates than were considered.
UNDECIDED = -1


def keep_greedy(logits: mx.array, drafts: mx.array, delta: mx.array) -> mx.array:
    """Returns whether each proposal is kept by the rule for temp = 0.

    The rule for a token x with target probability p(x) is p(x) >= (1 - delta) max p. It can be
    checked on the logits, without a softmax.
    With delta = 0 a proposal must be the argmax itself; a tie with the argmax is not enough.
    A token that a logits processor forbids (logit -inf) is never kept.

    Args:
        logits: (B, gamma, V) the target's logits for B rows of gamma proposals.
        drafts: (B, gamma) proposed tokens.
        delta: (B,) the rows' leniency.

    Returns:
        (B, gamma) bool.
    """
    proposed = mx.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0]
    floor = mx.max(logits, axis=-1) + mx.log1p(-delta)[:, None]
    near = (delta > 0)[:, None] & (proposed >= floor) & (proposed > -mx.inf)
    return near | (drafts == likeliest(logits))


def keep_sampled(px: mx.array, qx: mx.array, delta: mx.array, u: mx.array) -> mx.array:
    """Returns whether each proposal is kept by the rule for temp > 0.

    The rule is u < (1 - delta) px / qx + delta. The code multiplies both sides by qx.

    Args:
        px: (B, gamma) target probability of each of gamma proposals for B rows.
        qx: (B, gamma) draft probability of each proposal; 1 if the proposal was not sampled.
        delta: (B,) the rows' leniency.
        u: (B, gamma) random numbers, uniform on [0, 1).

    Returns:
        (B, gamma) bool.
    """
    delta = delta[:, None]
    return u * qx < (1 - delta) * px + delta * qx


def accepted_length(keep: mx.array, lengths: mx.array) -> mx.array:
    """Returns for each row the number of proposals before the first rejected one: (B,).

    Args:
        keep: (B, gamma or more) bool, whether the proposal at each position is kept.
        lengths: (B,) int32, number of proposals of each row; later positions are padding.
    """
    ends = mx.where(keep, lengths[:, None], mx.arange(keep.shape[1]))  # where a prefix may end
    return mx.min(ends, axis=1)


def residual(p: mx.array, q: mx.array) -> mx.array:
    """Returns the weights for sampling the token that replaces a rejected proposal.

    The weights are max(0, p - q), or p if p and q are almost equal.

    Args:
        p: (B, V) target probabilities of the vocabulary, for B rows.
        q: (B, V) draft probabilities.
    """
    rest = mx.maximum(p - q, 0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > NEGLIGIBLE_MASS, rest, p)


def accept(
    logits: mx.array,
    drafts: mx.array | None,
    q: mx.array | None,
    lengths: mx.array,
    sampling: Sampling,
    keys: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Keeps the longest acceptable prefix of each row's proposals and adds one token.

    Args:
        logits: (B, gamma + 1, V) float32 of the target. Proposal i is judged by the
            logits at position i; position gamma follows the last proposal.
        drafts: (B, gamma) int32, gamma proposals for each of B rows; None if there are none.
        q: (B, gamma, V) draft probabilities; None if no proposal was sampled or every delta is 0.
        lengths: (B,) int32, number of proposals of each row, without padding.
        sampling: settings of the rows.
        keys: (B, gamma + 1 or more, 2) random keys of the positions; None if every row is greedy.

    Returns:
        accepted (B,) int32, the number of proposals kept, and tokens (B, gamma + 1)
        int32: the proposals kept, and at position `accepted` the token that the
        target adds. Later tokens are meaningless. If no token can be chosen at a position
        (see `is_finite`), no proposal is kept from there on; a token added there is NO_TOKEN.
        A row's `accepted` is UNDECIDED if top-p needs more candidates than were considered;
        then call again with `sampling.exhaustive()`.
    """
    finite = is_finite(logits)
    if sampling.all_greedy:
        own = mx.where(finite, likeliest(logits), NO_TOKEN)
        if drafts is None:
            return lengths, own
        if not sampling.any_lenient:  # a proposal is kept where it is the target's own token
            return accepted_length(drafts == own[:, :-1], lengths), own
    placeholder = mx.zeros((len(logits), 1), mx.int32)
    drafts = placeholder if drafts is None else mx.concatenate([drafts, placeholder], axis=1)
    lengths, short = accepted_length(finite, lengths), None
    if sampling.all_greedy:
        accepted = accepted_length(keep_greedy(logits, drafts, sampling.delta), lengths)
    else:
        p, short = probabilities(logits, sampling)
        accepted, own = _accept_sampled(logits, p, drafts, q, lengths, sampling, keys)
        own = mx.where(mx.take_along_axis(finite, accepted[:, None], axis=1), own, NO_TOKEN)
    tokens = mx.where(mx.arange(drafts.shape[1]) < accepted[:, None], drafts, own)
    if short is not None:
        undecided = short & (mx.arange(drafts.shape[1]) <= accepted[:, None])
        accepted = mx.where(mx.any(undecided, axis=1), UNDECIDED, accepted)
    return accepted, tokens


def _accept_sampled(
    logits: mx.array,
    p: mx.array,
    drafts: mx.array,
    q: mx.array | None,
    lengths: mx.array,
    sampling: Sampling,
    keys: mx.array,
) -> tuple[mx.array, mx.array]:
    """Does the work of `accept` for a batch in which at least one row is sampled.

    Args:
        logits: (B, T, V) float32 of the target, for T = gamma + 1 positions of B rows.
        p: (B, T, V) float32, the target's probabilities.
        drafts: (B, T) int32, gamma proposals and a placeholder at the last position.
        q: (B, gamma, V) float32 draft probabilities; None if the proposals are deterministic.
        lengths: (B,) int32, number of proposals of each row, without padding.
        sampling: settings of the rows.
        keys: (B, T or more, 2) uint32, random keys of the positions.

    Returns:
        accepted (B,) int32, the number of proposals kept, and (B, 1) int32, the token added.
    """
    keys = keys[:, : drafts.shape[1]]
    own = sample(p.flatten(0, 1), fold(keys, 0, OWN).flatten(0, 1)).reshape(drafts.shape)
    accepted = accepted_length(drafts == own, lengths)
    if not sampling.any_lenient:
        return accepted, mx.take_along_axis(own, accepted[:, None], axis=1)
    px, qx = mx.take_along_axis(p, drafts[..., None], axis=-1)[..., 0], mx.ones(drafts.shape)
    if q is not None:
        q = mx.pad(q, ((0, 0), (0, 1), (0, 0)))
        qx = mx.take_along_axis(q, drafts[..., None], axis=-1)[..., 0]
    possible = mx.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0] > -mx.inf
    keep = keep_sampled(px, qx, sampling.delta, uniform(keys)) & possible
    if sampling.any_greedy:
        by_rank = keep_greedy(logits, drafts, sampling.delta)
        keep = mx.where((sampling.temp == 0)[:, None], by_rank, keep)
    lenient, row = sampling.delta > 0, mx.arange(len(lengths))
    accepted = mx.where(lenient, accepted_length(keep, lengths), accepted)
    q = one_hot(drafts[row, accepted], p.shape[-1]) if q is None else q[row, accepted]
    replacement = sample(residual(p[row, accepted], q), fold(keys[row, accepted], 0, REPLACE))
    replaced = lenient & (accepted < lengths)
    return accepted, mx.where(replaced, replacement, own[row, accepted])[:, None]
