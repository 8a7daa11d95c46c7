"""Compares the loss and its gradient with torch's."""

import numpy as np
import pytest

from mlx_t5.backend import mx, tree_unflatten
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.training import loss
from mlx_t5.training.batches import collate
from mlx_t5.training.learner import Learner
from mlx_t5.training.teacher_answers import label
from random_models import random_t5

torch = pytest.importorskip("torch", reason="requirements/dev.txt installs torch")
N, D, V, K = 7, 5, 11, 3


def case(k=K):
    """Returns states, head, the k likeliest tokens, their probabilities, and counted positions."""
    rng = np.random.default_rng(0)
    states, head = rng.normal(size=(N, D)), rng.normal(size=(V, D))
    p = torch.softmax(torch.tensor(rng.normal(size=(N, V)) * 2), -1)
    top = torch.topk(p, k)
    return states, head, top.indices.numpy(), top.values.numpy(), np.array([1, 1, 0, 1, 1, 1, 1])


def by_torch(states, head, ids, p, counted, temp):
    """Returns the loss by its definition, and torch's gradients."""
    states, head = (torch.tensor(a, requires_grad=True) for a in (states, head))
    q = torch.softmax(states @ head.T / temp, -1).gather(1, torch.tensor(ids))
    p = torch.tensor(p)
    rest_p, rest_q = (1 - probs.sum(-1).clamp(max=1) for probs in (p, q))
    terms = (p * (p / q).log()).sum(-1)
    if ids.shape[1] < V:
        terms = terms + rest_p * (rest_p / rest_q).log()
    total = (terms * torch.tensor(counted)).sum()
    total.backward()
    return total.item(), states.grad.numpy(), head.grad.numpy()


@pytest.mark.parametrize("k, temp, at_once", [(K, 1.0, 1 << 24), (K, 0.7, 2 * V), (V, 1.0, V)])
def test_loss_and_gradients_are_torchs(monkeypatch, k, temp, at_once):
    """The loss is computed at once and in parts, also with the whole distribution."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", at_once)
    states, head, ids, p, counted = case(k)
    arrays = [mx.array(a.astype(np.float32)) for a in (states, head)]
    rest = mx.array(ids.astype(np.int32)), mx.array(p.astype(np.float32)), mx.array(counted)

    def both(x, w):
        return loss.divergence(lambda a, b: a @ b.T, x, [w], *rest, temp)

    (_, total), slopes = mx.value_and_grad(both, argnums=(0, 1))(*arrays)
    expected, *gradients = by_torch(states, head, ids, p, counted, temp)
    assert total.item() == pytest.approx(expected, rel=1e-5)
    for slope, gradient in zip(slopes, gradients, strict=True):
        np.testing.assert_allclose(np.array(slope), gradient, atol=2e-6)
    frozen = mx.grad(lambda x: loss.divergence(lambda a: a @ arrays[1].T, x, [], *rest, temp)[0])
    np.testing.assert_allclose(np.array(frozen(arrays[0])), gradients[0], atol=2e-6)


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("ids", [range(1, 61, 2), [1, 3], range(60)])
def test_a_narrowed_drafts_loss_has_the_automatic_gradient(ids, own_head):
    """Tokens that the draft lacks count as the rest, even if the target prefers them."""
    target = random_t5()
    draft = shared_draft(target, 1)
    draft = whole(draft) if own_head else draft
    narrow(draft, np.array(ids))
    labeled = label(target, [((5, 9, 1), (7, 8, 1)), ((6, 1), (3, 44, 2, 1))])
    batch = collate(labeled, 0, 0, keep_states=False)
    mask, columns = np.isin(np.array(batch.top_ids), ids), np.array(batch.top_ids)
    assert mask.any() and not mask.all()
    columns = mx.array(np.where(mask, np.searchsorted(ids, columns), 0))
    p = mx.where(mx.array(mask), batch.top_p, 0)

    def plainly(weights):
        draft.update(tree_unflatten(list(weights.items())))
        cache = draft.cache(draft.encode(batch.source, batch.mask), batch.mask, 8)
        rows, _ = batch.tokens.shape
        q = mx.softmax(draft.decode(batch.tokens, cache, [0] * rows), axis=-1)
        top_q = mx.take_along_axis(q.flatten(0, 1), columns, axis=-1)
        rest_p = mx.maximum(1 - p.sum(-1), 0)
        rest_q = mx.maximum(1 - mx.where(mx.array(mask), top_q, 0).sum(-1), loss.LEAST_TAIL)
        terms = mx.where(p > 0, p * mx.log(mx.where(p > 0, p, 1) / top_q), 0).sum(-1)
        terms = terms + mx.where(rest_p > 0, rest_p * mx.log(rest_p / rest_q), 0)
        return (terms * batch.counted).sum()

    learner = Learner(draft, loss.token_loss(draft, 0.0), 10, 0.01)
    weights = learner.initial_state().weights
    assert ("lm_head.weight" in weights) == own_head and "d2t" not in weights
    total, slopes = learner._gradient(weights, batch.arrays)
    expected, gradients = mx.value_and_grad(plainly)(weights)
    assert total.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, gradient in gradients.items():
        scale = mx.abs(gradient).max().item()
        difference = mx.abs(gradient - slopes[name]).max().item()
        assert difference <= 1e-3 * scale + 1e-5, name
