"""Which proposals are kept, and what replaces a rejected one.

Pure functions on small arrays; no model and no state. The rules are those of
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(https://arxiv.org/abs/2211.17192) and Chen et al. (https://arxiv.org/abs/2302.01318),
relaxed by `delta`:

    temp > 0   keep x with probability min(1, (1 - delta) p(x)/q(x) + delta);
               a rejected x is replaced by a sample of norm(max(0, p - q))
    temp = 0   keep x when p(x) >= (1 - delta) max p; replaced by argmax p

When every proposal is kept, one more token comes from p. With delta = 0 the
tokens follow the target's distribution exactly; with delta > 0 each drafted
position follows the mixture (1 - delta) p + delta q.

Where temp > 0 and delta = 0, block verification (Sun et al.,
https://arxiv.org/abs/2403.10444) judges the proposals of a block together
instead: the same distribution, and never fewer tokens a step on average.

Symbols: B rows, gamma proposals a row, T = gamma + 1 positions, V vocabulary;
p target and q draft probabilities after temperature, top-k and top-p. A
deterministic proposal (greedy draft, copied text) has q(x) = 1 and is written
q = None.

Randomness: every row has a key of its own, and a draw is a function of that
key alone. So a row's tokens do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend import mx
from processors import Processing

# A residual lighter than this is rounding noise of two equal distributions.
NEGLIGIBLE_MASS = 1e-6

# The draws of one step, told apart by the word that `fold` mixes into the key.
ACCEPT, REPLACE, DRAFT = 0, 1, 2


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of the rows of a batch, one entry a row.

    The flags are known on the host, so that work no row asked for (sorting the
    vocabulary, softmax over every position) is never put into the graph.
    """

    temp: mx.array  # (B,) float32, 0 = greedy
    top_k: mx.array  # (B,) int32, 0 = off
    top_p: mx.array  # (B,) float32, 1 = off
    delta: mx.array  # (B,) float32
    block: mx.array  # (B,) bool, judge proposals as a block (needs temp > 0, delta = 0)
    all_greedy: bool
    any_greedy: bool
    any_block: bool
    filtered: bool  # some row uses top-k or top-p
    processing: Processing | None = None  # of the logits, before all this

    @classmethod
    def of(
        cls,
        temp: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        delta: Sequence[float],
        block: bool | Sequence[bool] = True,
        processing: Processing | None = None,
    ) -> Sampling:
        """Collects the settings of B rows, given as sequences of length B.

        Block verification is used where it applies, unless `block` is False for all rows or for
        this one.
        """
        wanted = [block] * len(temp) if isinstance(block, bool) else block
        joint = [b and t > 0 and d == 0 for b, t, d in zip(wanted, temp, delta, strict=True)]
        return cls(
            mx.array(temp, mx.float32),
            mx.array(top_k, mx.int32),
            mx.array(top_p, mx.float32),
            mx.array(delta, mx.float32),
            mx.array(joint, mx.bool_),
            all_greedy=all(t == 0 for t in temp),
            any_greedy=any(t == 0 for t in temp),
            any_block=any(joint),
            filtered=any(k > 0 for k in top_k) or any(p < 1 for p in top_p),
            processing=processing,
        )


def row_key(seed: int, index: int) -> mx.array:
    """Key (2,) of the prompt with this index in a call with this seed.

    The seed is hashed before the index is mixed in, so that neighbouring seeds
    and neighbouring indices share no stream.
    """
    return fold(mx.random.key(seed), index, 0)


def fold(keys: mx.array, word: int | mx.array, purpose: int) -> mx.array:
    """Derives keys (..., 2) from keys (..., 2), a counter and a purpose.

    Threefry, the generator behind `mx.random`, is a pseudo-random function of
    its key: hashing once and then changing a word gives independent streams.
    """
    hashed = _each_key(lambda key: mx.random.split(key)[0], keys)
    word = mx.broadcast_to(mx.array(word).astype(mx.uint32), keys.shape[:-1])
    return hashed ^ mx.stack([mx.full(word.shape, purpose, mx.uint32), word], axis=-1)


def _each_key(draw, keys: mx.array) -> mx.array:
    """Applies `draw`, a function of one key (2,), to keys (..., 2)."""
    for _ in keys.shape[:-1]:
        draw = mx.vmap(draw)
    return draw(keys)


def probabilities(logits: mx.array, sampling: Sampling) -> mx.array:
    """Turns logits into the probabilities that a row samples from.

    Temperature, then top-k, then top-p, in the order of transformers' logits
    warpers; equal logits at a threshold are all kept. A row with temp = 0 puts
    all its mass on the (first) largest logit.

    Args:
        logits: (B, T, V) float32.
        sampling: settings of the B rows.

    Returns:
        (B, T, V) float32, each row summing to one.
    """
    greedy = (sampling.temp == 0)[:, None, None]
    scaled = logits / mx.where(greedy, 1.0, sampling.temp[:, None, None])
    if sampling.filtered:
        floor = _smallest_kept_logit(scaled, sampling)
        scaled = mx.where(scaled < floor, -mx.inf, scaled)
    p = mx.softmax(scaled, axis=-1, precise=True)
    if sampling.any_greedy:
        p = mx.where(greedy, one_hot(mx.argmax(logits, axis=-1), logits.shape[-1]), p)
    return p


def _smallest_kept_logit(scaled: mx.array, sampling: Sampling) -> mx.array:
    """Smallest logit (B, T, 1) that survives top-k and then top-p."""
    vocab_size = scaled.shape[-1]
    descending = mx.sort(scaled, axis=-1)[..., ::-1]
    k = mx.where(sampling.top_k > 0, mx.minimum(sampling.top_k, vocab_size), vocab_size)
    beyond_k = mx.arange(vocab_size) >= k[:, None, None]
    p = mx.softmax(mx.where(beyond_k, -mx.inf, descending), axis=-1, precise=True)
    # A token stays while the mass in front of it is below top_p: the nucleus is
    # the smallest set that reaches top_p, and holds one token at least.
    in_front = mx.cumsum(p, axis=-1) - p
    top_p = sampling.top_p[:, None, None]
    dropped = beyond_k | ((in_front >= top_p) & (top_p < 1))
    return mx.min(mx.where(dropped, mx.inf, descending), axis=-1, keepdims=True)


def one_hot(tokens: mx.array, vocab_size: int) -> mx.array:
    """Indicator (..., V) float32 of tokens (...)."""
    return (mx.arange(vocab_size) == tokens[..., None]).astype(mx.float32)


def sample(weights: mx.array, keys: mx.array) -> mx.array:
    """Draws one token a row by the Gumbel-max trick.

    Args:
        weights: (B, V) non-negative, need not sum to one.
        keys: (B, 2).

    Returns:
        Tokens (B,) int32.
    """
    vocab_size = weights.shape[-1]
    noise = _each_key(lambda key: mx.random.gumbel((vocab_size,), key=key), keys)
    return mx.argmax(mx.log(weights) + noise, axis=-1).astype(mx.int32)


def keep_greedy(logits: mx.array, drafts: mx.array, delta: mx.array) -> mx.array:
    """Judges each proposal by the rule for temp = 0.

    p(x) >= (1 - delta) max p is a comparison of logits, so no softmax is needed.
    With delta = 0 the proposal must be the argmax itself, not merely tie with it.
    A token that the rules for the text forbid (logit -inf) is never kept.

    Args:
        logits: (B, gamma, V) of the target where each proposal stands.
        drafts: (B, gamma) proposed tokens.
        delta: (B,).

    Returns:
        (B, gamma) bool.
    """
    proposed = mx.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0]
    floor = mx.max(logits, axis=-1) + mx.log1p(-delta)[:, None]
    near = (delta > 0)[:, None] & (proposed >= floor) & (proposed > -mx.inf)
    return near | (drafts == mx.argmax(logits, axis=-1))


def keep_sampled(px: mx.array, qx: mx.array, delta: mx.array, u: mx.array) -> mx.array:
    """Judges each proposal by the rule for temp > 0.

    u < (1 - delta) p/q + delta, multiplied through by q.

    Args:
        px: (B, gamma) target probability of each proposal.
        qx: (B, gamma) its draft probability, 1 if deterministic.
        delta: (B,).
        u: (B, gamma) uniform on [0, 1).

    Returns:
        (B, gamma) bool.
    """
    delta = delta[:, None]
    return u * qx < (1 - delta) * px + delta * qx


def accepted_length(keep: mx.array, lengths: mx.array) -> mx.array:
    """Length (B,) of the longest prefix that is kept throughout.

    Args:
        keep: (B, gamma) bool.
        lengths: (B,) proposals that are real; the rest of a row is padding.
    """
    real = mx.arange(keep.shape[1]) < lengths[:, None]
    return mx.cumprod((keep & real).astype(mx.int32), axis=1).sum(axis=1)


def joint_ratio(px: mx.array, qx: mx.array) -> mx.array:
    """Weight w (B, gamma + 1) of each prefix of a block: w_0 = 1, w_i = min(1, w_(i-1) p/q).

    Args:
        px: (B, gamma) target probability of each proposal.
        qx: (B, gamma) its draft probability.
    """
    w = [mx.ones(px.shape[0])]
    for i in range(px.shape[1]):
        w.append(mx.minimum(w[-1] * px[:, i] / qx[:, i], 1))
    return mx.stack(w, axis=1)


def accepted_block(
    p: mx.array, q: mx.array, w: mx.array, lengths: mx.array, u: mx.array
) -> mx.array:
    """Length (B,) of the block that is kept (algorithm 2 of the paper).

    The longest prefix of i proposals with u_i < h_i, where h_i = w_i for the
    whole block and R / (R + 1 - w_i) with R = sum max(0, w_i p - q) otherwise.

    Args:
        p: (B, gamma + 1, V) target probabilities after each prefix.
        q: (B, gamma + 1, V) draft probabilities there.
        w: (B, gamma + 1), see `joint_ratio`.
        lengths: (B,) proposals that are real; the rest of a row is padding.
        u: (B, gamma + 1) uniform on [0, 1), u_i for the prefix of i proposals.
    """
    rest = mx.maximum(w[..., None] * p - q, 0).sum(axis=-1)
    beyond = 1 - w
    certain = rest + beyond <= 0  # p = q: nothing could replace the next token
    h = mx.where(certain, 1.0, rest / mx.where(certain, 1.0, rest + beyond))
    prefix = mx.arange(w.shape[1])
    h = mx.where(prefix == lengths[:, None], w, h)
    kept = (u < h) & (prefix <= lengths[:, None])
    return mx.max(mx.where(kept, prefix, 0), axis=1).astype(mx.int32)


def residual(p: mx.array, q: mx.array) -> mx.array:
    """Weights max(0, p - q) that replace a rejected token; p where they vanish.

    Args:
        p: (B, V) target probabilities.
        q: (B, V) draft probabilities.
    """
    rest = mx.maximum(p - q, 0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > NEGLIGIBLE_MASS, rest, p)


def verify(
    logits: mx.array,
    drafts: mx.array | None,
    q: mx.array | None,
    lengths: mx.array,
    sampling: Sampling,
    keys: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Keeps the longest acceptable prefix of each row and adds one token.

    Args:
        logits: (B, gamma + 1, V) float32 of the target: position i judges
            proposal i, position gamma follows the last one.
        drafts: (B, gamma) int32, None when nothing was proposed.
        q: (B, gamma, V) their draft probabilities, None if deterministic.
        lengths: (B,) int32, how many proposals of each row are real.
        sampling: settings of the rows.
        keys: (B, 2) keys of this step; None if every row is greedy.

    Returns:
        accepted (B,) int32, the number of proposals kept, and tokens
        (B, gamma + 1) int32: the proposals, with the target's own token at
        position `accepted`. What stands after it is meaningless.
    """
    batch, positions, _ = logits.shape
    own_place = mx.zeros((batch, 1), mx.int32)
    drafts = own_place if drafts is None else mx.concatenate([drafts, own_place], axis=1)
    if sampling.all_greedy:
        accepted = accepted_length(keep_greedy(logits, drafts, sampling.delta), lengths)
        best = mx.argmax(logits, axis=-1).astype(mx.int32)
        own = mx.take_along_axis(best, accepted[:, None], axis=1)
    else:
        accepted, own = _verify_sampled(logits, drafts, q, lengths, sampling, keys)
    here = mx.arange(positions) == accepted[:, None]
    return accepted, mx.where(here, own, drafts)


def _verify_sampled(logits, drafts, q, lengths, sampling, keys) -> tuple[mx.array, mx.array]:
    """`verify` where some row samples; drafts (B, gamma + 1) end in a placeholder."""
    p = probabilities(logits, sampling)
    q = one_hot(drafts, p.shape[-1]) if q is None else mx.pad(q, ((0, 0), (0, 1), (0, 0)))
    px, qx = (mx.take_along_axis(x, drafts[..., None], axis=-1)[..., 0] for x in (p, q))
    u = _uniform(keys, drafts.shape[1])
    forbidden = mx.take_along_axis(logits, drafts[..., None], axis=-1)[..., 0] == -mx.inf
    keep = keep_sampled(px, qx, sampling.delta, u) & ~forbidden
    if sampling.any_greedy:
        by_rank = keep_greedy(logits, drafts, sampling.delta)
        keep = mx.where((sampling.temp == 0)[:, None], by_rank, keep)
    accepted, w = accepted_length(keep, lengths), mx.ones_like(px)
    if sampling.any_block:
        ratios = joint_ratio(px[:, :-1], qx[:, :-1])
        accepted = mx.where(sampling.block, accepted_block(p, q, ratios, lengths, u), accepted)
        w = mx.where(sampling.block[:, None], ratios, w)

    here = accepted[:, None]
    w = mx.take_along_axis(w, here, axis=1)
    p, q = (mx.take_along_axis(x, here[..., None], axis=1)[:, 0] for x in (p, q))
    rejected = (accepted < lengths)[:, None]
    rest = mx.where(rejected, residual(w * p, q), p)
    return accepted, sample(rest, fold(keys, 0, REPLACE))[:, None]


def _uniform(keys: mx.array, count: int) -> mx.array:
    """(B, count) uniform draws, draw i a function of the row's key and i alone."""
    grid = (keys.shape[0], count)
    each = fold(
        mx.broadcast_to(keys[:, None], (*grid, 2)), mx.broadcast_to(mx.arange(count), grid), ACCEPT
    )
    return _each_key(lambda key: mx.random.uniform(key=key), each)
