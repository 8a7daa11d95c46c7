"""Decides which proposals are kept, and which token replaces a rejected one.

    delta = 0             the target chooses its own token at each position; a proposal x is kept
                          if it is that token, and is replaced by that token otherwise
    delta > 0, temp > 0   x is kept with probability min(1, (1 - delta) p(x)/q(x) + delta);
                          a rejected x is replaced by a sample of max(0, p - q), normalized
    delta > 0, temp = 0   x is kept if p(x) >= (1 - delta) max p;
                          a rejected x is replaced by argmax p

With delta = 0 the text is the target's own, and a seed gives the same text with any draft or none:
the random numbers at a position depend only on the position and the row's key. The draft uses them
too, so it mostly samples the same token (Daliri et al., https://arxiv.org/abs/2408.07978).

The rules for delta > 0 relax those of Leviathan et al. (https://arxiv.org/abs/2211.17192) and Chen
et al. (https://arxiv.org/abs/2302.01318). With temp > 0, each drafted position has the distribution
(1 - delta) p + delta q. When every proposal is kept, the target adds one more token from p.

Symbols: B rows, gamma proposals per row, T = gamma + 1 positions, V vocabulary; delta leniency;
p target and q draft probabilities, after temperature, top-k, top-p and min-p. A deterministic
proposal (greedy, or copied) has q(x) = 1; q is None if all are, or if every delta is 0.
"""

from __future__ import annotations

from mlx_t5.backend import mx
from mlx_t5.sampling import draws
from mlx_t5.sampling.draws import Sampling, fold, gather, likeliest, sample

NEGLIGIBLE_MASS = 1e-6  # a residual with less is rounding noise of two equal distributions
NO_TOKEN = -1  # no token can be chosen from the logits: `draws.is_finite`
UNDECIDED = -1  # top-p needs more candidates than were considered


def keep_greedy(logits: mx.array, drafts: mx.array, delta: mx.array) -> mx.array:
    """Whether each proposal (B, gamma) is kept by the rule for temp = 0; logits (B, gamma, V)."""
    proposed = gather(logits, drafts)
    # On the logits, without a softmax.
    floor = mx.max(logits, axis=-1) + mx.log1p(-delta)[:, None]
    # Not tokens that a logits processor forbids; and with delta = 0 not even a tie with the argmax.
    near = (delta > 0)[:, None] & (proposed >= floor) & (proposed > -mx.inf)
    return near | (drafts == likeliest(logits))


def keep_sampled(px: mx.array, qx: mx.array, delta: mx.array, u: mx.array) -> mx.array:
    """Whether each proposal is kept for temp > 0: u < (1 - delta) px / qx + delta."""
    delta = delta[:, None]
    return u * qx < (1 - delta) * px + delta * qx


def accepted_length(keep: mx.array, lengths: mx.array) -> mx.array:
    """The number of proposals (B,) before the first rejected one, at most `lengths`."""
    ends = mx.where(keep, lengths[:, None], mx.arange(keep.shape[1]))  # where a prefix may end
    return mx.min(ends, axis=1)


def residual(p: mx.array, q: mx.array) -> mx.array:
    """Weights (B, V) for the replacement: max(0, p - q), or p if p and q are almost equal."""
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
        logits: (B, T, V) float32 of the target; proposal i is judged by those at position i.
        drafts: (B, gamma) int32 proposals; None if there are none.
        q: (B, gamma, V) draft probabilities, or None.
        lengths: (B,) int32, number of proposals of each row, without padding.
        sampling: settings of the rows.
        keys: (B, T or more, 2) random keys of the positions; None if every row is greedy.

    Returns:
        accepted (B,) int32, the number of proposals kept, and tokens (B, T) int32: the proposals
        kept, then the token that the target adds, then anything. No proposal is kept from the first
        position on at which no token can be chosen; a token added there is NO_TOKEN. A row's
        `accepted` is UNDECIDED if top-p needs more candidates than were considered; then call again
        with `sampling.exhaustive()`.
    """
    finite = draws.is_finite(logits)
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
        p, short = draws.probabilities(logits, sampling)
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
    """`accept` if a row is sampled; `drafts` (B, T) ends in a placeholder; one token (B, 1)."""
    keys = keys[:, : drafts.shape[1]]
    own = sample(p.flatten(0, 1), fold(keys, 0, draws.OWN).flatten(0, 1)).reshape(drafts.shape)
    accepted = accepted_length(drafts == own, lengths)
    if not sampling.any_lenient:
        return accepted, mx.take_along_axis(own, accepted[:, None], axis=1)
    qx = mx.ones(drafts.shape)  # of deterministic proposals
    if q is not None:
        q = mx.pad(q, ((0, 0), (0, 1), (0, 0)))  # for the placeholder
        qx = gather(q, drafts)
    keep = keep_sampled(gather(p, drafts), qx, sampling.delta, draws.uniform(keys))
    keep = keep & (gather(logits, drafts) > -mx.inf)  # not tokens that a processor forbids
    if sampling.any_greedy:
        by_rank = keep_greedy(logits, drafts, sampling.delta)
        keep = mx.where((sampling.temp == 0)[:, None], by_rank, keep)
    # Rows with delta = 0 keep what is computed above, as if no other row were lenient.
    lenient, row = sampling.delta > 0, mx.arange(len(lengths))
    accepted = mx.where(lenient, accepted_length(keep, lengths), accepted)
    q = draws.one_hot(drafts[row, accepted], p.shape[-1]) if q is None else q[row, accepted]
    replacement = sample(residual(p[row, accepted], q), fold(keys[row, accepted], 0, draws.REPLACE))
    replaced = lenient & (accepted < lengths)
    return accepted, mx.where(replaced, replacement, own[row, accepted])[:, None]
