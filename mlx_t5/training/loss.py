"""How far a model's distribution q of the next token is from p: KL(p || q).

For a draft p is the target's. For a text that is given, p is 1 for its token, and KL(p || q) is the
cross-entropy.

Of p only the K likeliest tokens are kept, and the mass r of all others (`answers.TOP_K`). With
t = 1 - sum of q over the K tokens,

    loss = sum of p_k log(p_k / q_k) + r log(r / t),

the divergence of the two distributions in which the other tokens are one. Its gradient with respect
to the logits is q_k - p_k at the K tokens and q_j (1 - r / t) at the others, so one softmax gives
both (forward KL: Hinton et al., https://arxiv.org/abs/1503.02531).

A draft with a vocabulary of its own has logits of its tokens only. Tokens that it lacks count with
the others, even if they are the target's likeliest.

Logits of all positions at once would be the largest array of a training step by far. They are made
for some positions at a time, and what the head has to say about the hidden states and about its own
weights is added up. The result is a number whose gradient is that: see `divergence`.

Symbols: N positions, K likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mlx_t5.backend import mx
from mlx_t5.network.draft_vocabulary import DraftVocabulary
from mlx_t5.network.linear import Matrix
from mlx_t5.training.batches import TrainingBatch

if TYPE_CHECKING:
    from model import T5

LOGITS_AT_ONCE = 1 << 24  # numbers: 64 MB in float32
LEAST_TAIL = 1e-6  # of t: float32 cannot tell less from nothing
LEAST_PROBABILITY = 1e-30  # of q_k, where its logarithm is taken
Head = Callable[..., mx.array]  # hidden states (N, d_model), and weights if it has own → (N, V)


def token_loss(draft: T5, temp: float) -> Callable[..., tuple[mx.array, mx.array]]:
    """The loss of a draft or of a model that is fine-tuned, as `learner.Learner` takes it.

    Args:
        draft: a `model.T5`; reads the target's encoder output where a batch has it.
        temp: temperature at which the target is sampled; 0 is greedy.
    """
    vocabulary = DraftVocabulary(draft, draft.config.vocab_size)
    rows_of, size = vocabulary.rows, vocabulary.size

    def loss(weights: Mapping[str, mx.array], batch: TrainingBatch) -> tuple[mx.array, mx.array]:
        if batch.states is None:
            encoded = draft.encode(batch.source, batch.mask)
        else:
            encoded = batch.states.astype(mx.float32)
        rows, length = batch.tokens.shape
        cache = draft.cache(encoded, batch.mask, capacity=length)
        states = draft.decoder_states(batch.tokens, cache, [0] * rows)
        names = ("lm_head.weight", "shared.weight")
        trained = [weights[name] for name in names if name in weights][:1]

        def head(states: mx.array, *weight: mx.array) -> mx.array:
            logits = draft.logits(states, Matrix.plain(*weight) if weight else None)
            if rows_of is None:
                return logits  # else a spare one, of probability 0, stands for the other tokens
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
    """The loss, summed over positions.

    Args:
        head: logits from hidden states; float32.
        states: (N, d_model) of the draft.
        weights: what `head` takes besides, if that is trained too.
        top_ids: (N, K) the target's likeliest tokens.
        top_p: (N, K) their probabilities.
        counted: (N,) 1 where a position counts, 0 for padding.
        temp: temperature at which q is taken, as p was.

    Returns:
        A number to differentiate with respect to `states` and `weights`, whose value means nothing;
        and the sum of the losses, whose gradient is 0.
    """
    fixed, frozen = mx.stop_gradient(states), list(map(mx.stop_gradient, weights))
    step = max(1, LOGITS_AT_ONCE // head(fixed[:1], *frozen).shape[-1])
    total, of_weights = mx.array(0.0), [mx.zeros_like(w) for w in frozen]
    of_states: list[mx.array] = []
    for start in range(0, len(fixed), step):
        chunk = slice(start, start + step)
        # Behind the chunk before, so that only one chunk's logits are there at a time.
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
    """The loss, summed over positions, and its gradient (N, V) with respect to logits (N, V).

    Arguments as in `divergence`; the temperature is in the logits already.
    """
    q = mx.softmax(logits, axis=-1)
    top_q = mx.take_along_axis(q, top_ids, axis=-1)
    rest_p = mx.maximum(1 - mx.sum(top_p, axis=-1, keepdims=True), 0)
    rest_q = mx.maximum(1 - mx.sum(top_q, axis=-1, keepdims=True), LEAST_TAIL)
    known = _terms(top_p, top_q).sum(axis=-1) + _terms(rest_p, rest_q)[:, 0]
    slope = q * (counted[:, None] * (1 - rest_p / rest_q))
    slope = mx.put_along_axis(slope, top_ids, counted[:, None] * (top_q - top_p), axis=-1)
    return mx.sum(counted * known), slope


def _terms(p: mx.array, q: mx.array) -> mx.array:
    """p log(p / q), 0 where p is."""
    p_log, q_log = (mx.log(mx.maximum(x, LEAST_PROBABILITY)) for x in (p, q))
    return p * (p_log - q_log)
