"""Computes the training loss KL(p || q), where q is the trained model's next-token distribution.

When a draft is trained, p is the target's distribution. When a model is trained on given texts, p
is 1 for the text's next token, and KL(p || q) is the cross-entropy.

The loss uses only the probabilities p_k of the K likeliest tokens (`teacher_answers.TOP_K`) and
the sum r of all other probabilities in p. With t = 1 - (the sum of q_k over these K tokens),

    loss = sum of p_k log(p_k / q_k) + r log(r / t).

This is KL(p || q) if all other tokens count as one token. Its gradient with respect to the
logits is q_k - p_k at the K tokens and q_j (1 - r / t) at every other token j. So loss and gradient
need only one softmax, q (forward KL: Hinton et al., https://arxiv.org/abs/1503.02531).

A draft with its own vocabulary has logits for its own tokens only. The tokens that it lacks count
as other tokens, even if they are among the target's K likeliest.

The logits of all positions would be by far the largest array of a training step. So `divergence`
computes logits and gradient for one chunk of positions at a time. It returns two scalars: a
surrogate, and the loss. The surrogate has the gradient of the loss, but its value has no meaning.

Symbols: N positions, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlx_t5.backend import mx
from mlx_t5.model import T5
from mlx_t5.network.draft_vocabulary import DraftVocabulary
from mlx_t5.network.linear import Matrix
from mlx_t5.training.batches import TrainingBatch

LOGITS_AT_ONCE = 1 << 24  # numbers in a chunk's logits: 64 MB in float32
LEAST_TAIL = 1e-6  # minimum of t: in float32 smaller values are rounding noise
LEAST_PROBABILITY = 1e-30  # minimum of probabilities in logarithms
# A function from hidden states (N, d_model), and the head's weights if they are trained, to logits
# (N, V).
Head = Callable[..., mx.array]


def token_loss(draft: T5, temp: float) -> Callable[..., tuple[mx.array, mx.array]]:
    """The loss of a draft or a fine-tuned model, as a function for `learner.Learner`."""
    vocabulary = DraftVocabulary(draft, draft.config.vocab_size)
    rows_of, size = vocabulary.rows, vocabulary.size

    def loss(weights: Mapping[str, mx.array], batch: TrainingBatch) -> tuple[mx.array, mx.array]:
        if batch.states is None:
            encoded = draft.encode(batch.source, batch.mask)
        else:
            encoded = batch.states.astype(mx.float32)
        cache = draft.cache(encoded, batch.mask, capacity=batch.tokens.shape[1])
        states = draft.decoder_states(batch.tokens, cache)
        heads = ("lm_head.weight", "shared.weight")
        trained = [weights[name] for name in heads if name in weights][:1]

        def head(states: mx.array, *weight: mx.array) -> mx.array:
            logits = draft.logits(states, Matrix.plain(*weight) if weight else None)
            if rows_of is None:
                return logits
            # A last logit, of probability 0, stands for the tokens that the draft lacks.
            return mx.pad(logits, ((0, 0), (0, 1)), constant_values=-mx.inf)

        ids, p = batch.top_ids, batch.top_p
        if rows_of is not None:
            ids = rows_of[ids]
            p = mx.where(ids < size, p, 0)
        return divergence(head, states, trained, ids, p, batch.counted, temp or 1.0)

    return loss


def divergence(
    head: Head,
    states: mx.array,
    weights: Sequence[mx.array],
    top_ids: mx.array,
    top_p: mx.array,
    counted: mx.array,
    temp: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """KL(p || q), summed over positions, one chunk of positions at a time.

    Args:
        head: computes float32 logits from hidden states.
        states: (N, d_model) the trained model's hidden states.
        weights: the head's weights, passed on to `head`; empty if they are not trained.
        top_ids: (N, K) the K likeliest tokens at each position, according to the target.
        top_p: (N, K) the probabilities p of these tokens.
        counted: (N,) 1 where a position counts, 0 for padding.
        temp: the temperature of q; equal to that of p.

    Returns:
        A surrogate with the gradient of the loss, and the loss as a constant.
    """
    fixed, frozen = mx.stop_gradient(states), list(map(mx.stop_gradient, weights))
    step = max(1, LOGITS_AT_ONCE // head(fixed[:1], *frozen).shape[-1])
    total, of_weights = mx.array(0.0), [mx.zeros_like(w) for w in frozen]
    of_states: list[mx.array] = []
    for start in range(0, len(fixed), step):
        chunk = slice(start, start + step)
        # Computed after the previous chunk, so that memory holds the logits of only one chunk.
        (x,) = mx.depends([fixed[chunk]], [total, *of_states[-1:]])
        logits = head(x, *frozen) / temp
        loss, slope = loss_and_slope(logits, top_ids[chunk], top_p[chunk], counted[chunk])
        _, (of_x, *of_frozen) = mx.vjp(head, [x, *frozen], [slope / temp])
        total = total + loss
        of_states.append(of_x)
        of_weights = [a + b for a, b in zip(of_weights, of_frozen, strict=True)]
    slopes = [mx.concatenate(of_states), *of_weights]
    pairs = zip([states, *weights], map(mx.stop_gradient, slopes), strict=True)
    return sum((mx.sum(a * b) for a, b in pairs), mx.array(0.0)), mx.stop_gradient(total)


def loss_and_slope(
    logits: mx.array, top_ids: mx.array, top_p: mx.array, counted: mx.array
) -> tuple[mx.array, mx.array]:
    """The summed loss, and its gradient (N, V) with respect to logits divided by temperature."""
    q = mx.softmax(logits, axis=-1)
    top_q = mx.take_along_axis(q, top_ids, axis=-1)
    rest_p = mx.maximum(1 - mx.sum(top_p, axis=-1, keepdims=True), 0)
    rest_q = mx.maximum(1 - mx.sum(top_q, axis=-1, keepdims=True), LEAST_TAIL)
    known = _terms(top_p, top_q).sum(axis=-1) + _terms(rest_p, rest_q)[:, 0]
    slope = q * (counted[:, None] * (1 - rest_p / rest_q))
    slope = mx.put_along_axis(slope, top_ids, counted[:, None] * (top_q - top_p), axis=-1)
    return mx.sum(counted * known), slope


def _terms(p: mx.array, q: mx.array) -> mx.array:
    p_log, q_log = (mx.log(mx.maximum(x, LEAST_PROBABILITY)) for x in (p, q))
    return p * (p_log - q_log)
