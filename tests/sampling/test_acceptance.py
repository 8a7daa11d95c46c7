"""Tests which proposals are kept: literal cases first, then the resulting distribution."""

import numpy as np
import pytest

from draws import check_draws, many_keys, mixed, position_keys, settings
from mlx_t5.backend import mx
from mlx_t5.sampling import acceptance
from mlx_t5.sampling.draws import OWN, fold, one_hot, sample

# A delta so small that 1 - delta is 1 in float32: proposals are judged by the rule of
# Leviathan et al. with p and q.
STRICT = 1e-9


def test_keep_greedy_wants_the_argmax_itself():
    logits = mx.array([[[1.0, 3.0, 3.0], [0.0, 5.0, 4.9]]])
    keep = acceptance.keep_greedy(logits, mx.array([[1, 2]]), mx.array([0.0]))
    assert keep.tolist() == [[True, False]]
    # Token 2 ties with the argmax, but regular decoding would have written token 1.
    keep = acceptance.keep_greedy(logits, mx.array([[2, 1]]), mx.array([0.0]))
    assert keep.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("px", "qx", "delta", "threshold"),
    [(0.2, 0.4, 0.0, 0.5), (0.2, 0.4, 0.5, 0.75), (0.2, 1.0, 0.0, 0.2), (0.0, 1.0, 0.3, 0.3)],
)
def test_keep_sampled_with_probability_of_the_rule(px, qx, delta, threshold):
    u = mx.array([[threshold - 1e-3, threshold + 1e-3]])
    both = mx.ones((1, 2))
    keep = acceptance.keep_sampled(px * both, qx * both, mx.array([delta]), u)
    assert keep.tolist() == [[True, False]]


def test_keep_sampled_at_the_ends_of_the_unit_interval():
    ends = mx.array([[0.0, 1 - 2**-24]])
    one = mx.ones((1, 2))
    zero_delta = mx.array([0.0])
    # The target always writes the token, or never; delta = 1 keeps even an impossible token.
    assert acceptance.keep_sampled(one, one, zero_delta, ends).tolist() == [[True, True]]
    assert acceptance.keep_sampled(0 * one, one, zero_delta, ends).tolist() == [[False, False]]
    assert acceptance.keep_sampled(0 * one, one, mx.array([1.0]), ends).tolist() == [[True, True]]


def test_accepted_length_stops_at_the_first_rejection_and_at_the_padding():
    keep = mx.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).astype(mx.bool_)
    lengths = mx.array([4, 4, 4, 2])
    assert acceptance.accepted_length(keep, lengths).tolist() == [2, 0, 4, 2]


def test_the_residual_is_the_excess_of_p_over_q():
    p = mx.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    q = mx.array([[0.7, 0.1, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]])
    expected = [[0, 0.2, 0], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]  # row 1: p = q, so the residual is p
    np.testing.assert_allclose(acceptance.residual(p, q), expected, atol=1e-6)


def greedily(logits, drafts, length, delta):
    """Applies the rule to one greedy row; returns (number accepted, tokens that count)."""
    tokens = []
    for i, position in enumerate(logits):
        largest, best = position.max(), int(position.argmax())
        if not np.isfinite(largest):  # NaN, +inf, or all tokens forbidden
            best = acceptance.NO_TOKEN
            break
        if i == length:
            break
        logit = position[drafts[i]]
        near = delta > 0 and logit > -np.inf and np.exp(logit - largest) >= 1 - delta
        if drafts[i] != best and not near:
            break
        tokens.append(drafts[i])
    return len(tokens), [*tokens, best]


@pytest.mark.parametrize("deltas", [[0.0], [0.6], [1.0], [0.0, 0.3, 0.9]], ids=str)
@pytest.mark.parametrize("positions", range(1, 7))
def test_greedy_rows_follow_the_rule_whatever_the_logits(positions, deltas):
    rng = np.random.default_rng(positions)
    rows, vocab = 240, 5
    # Few values, so that many tie; one of 20 logits is -inf, and one of 100 is NaN or +inf.
    odds = np.array([0.235, 0.235, 0.235, 0.235, 0.05, 0.005, 0.005])
    values = np.array([0.0, 0.4, 1.0, 2.5, -np.inf, np.inf, np.nan], np.float32)
    logits = rng.choice(values, (rows, positions, vocab), p=odds)
    logits[rng.random((rows, positions)) < 0.02] = -np.inf
    likely = rng.random((rows, positions - 1)) < 0.7
    drafts = np.where(likely, logits[:, :-1].argmax(-1), rng.integers(0, vocab, likely.shape))
    lengths = rng.integers(0, positions, rows)
    greedy = [{"temp": 0.0, "delta": delta} for delta in deltas]
    sampling = mixed(*greedy, times=rows // len(deltas))
    x = mx.array(drafts, mx.int32) if positions > 1 else None
    outcome = acceptance.accept(
        mx.array(logits), x, None, mx.array(lengths, mx.int32), sampling, None
    )
    assert [a.dtype for a in outcome] == [mx.int32] * 2
    written = [(n, row[: n + 1]) for n, row in zip(*(a.tolist() for a in outcome), strict=True)]
    delta = np.array(sampling.delta)
    assert written == [greedily(*row) for row in zip(logits, drafts, lengths, delta, strict=True)]
    assert {n for n, _ in written} == set(range(positions)), "every length is met"
    assert any(tokens[-1] == acceptance.NO_TOKEN for _, tokens in written)


# p and q of one position over four tokens, for different kinds of drafts.
P = np.array([0.5, 0.3, 0.2, 0.0])
LOGITS = mx.maximum(mx.log(mx.array(P)), -1e4)  # -inf would say that rules forbid the token
DRAFTS = {
    "the target itself": P,
    "good": np.array([0.4, 0.35, 0.2, 0.05]),
    "disagrees everywhere": np.array([0.0, 0.0, 0.0, 1.0]),
    "has no mass where the target has most": np.array([0.0, 0.1, 0.5, 0.4]),
    "certain of token 0": 0,
    "certain of token 3": 3,
}


@pytest.mark.parametrize("delta", [0.0, STRICT, 0.3, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_drafted_position_follows_the_mixture(draft, delta, monkeypatch):
    monkeypatch.setattr("mlx_t5.sampling.draws.BLOCK", 2)  # two blocks, and less padding
    draws, q = 40_000, DRAFTS[draft]
    if certain := isinstance(q, int):
        x, q = mx.full(draws, q, mx.int32), np.eye(4)[q]
    else:
        x = sample(mx.broadcast_to(mx.array(q), (draws, 4)), many_keys(draws, 1))
    accepted, tokens = acceptance.accept(
        mx.broadcast_to(LOGITS, (draws, 2, 4)),
        x[:, None],
        None if certain else mx.broadcast_to(mx.array(q)[None, None], (draws, 1, 4)),
        mx.ones(draws, mx.int32),
        settings(draws, delta=delta),
        position_keys(draws, 2, 2),
    )
    check_draws(tokens[:, 0], (1 - delta) * P + delta * q)
    # After an accepted proposal, the next token is drawn from p.
    more = np.array(tokens)[np.array(accepted) == 1, 1]
    if len(more):
        check_draws(more, P)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
def test_forbidden_tokens_are_never_kept(temp, delta):
    logits = mx.array([[[0.5, -mx.inf, 0.1], [0.0, 0.0, 0.0]]])
    accepted, tokens = acceptance.accept(
        logits,
        mx.array([[1]]),
        None,
        mx.array([1]),
        settings(temp=temp, delta=delta),
        position_keys(1, 2),
    )
    assert accepted.item() == 0
    assert tokens[0, 0].item() in (0, 2)


@pytest.mark.parametrize("delta", [(0.0, 0.0), (STRICT,) * 2, (0.0, STRICT)], ids=str)
def test_certain_proposals_need_no_draft_probabilities(delta):
    """q = None means q = 1 for each proposal and needs no probabilities of other tokens."""
    draws, gamma, vocab = 1000, 3, 5
    logits = mx.random.normal((draws, gamma + 1, vocab), key=mx.random.key(3))
    drafts = mx.random.randint(0, vocab, (draws, gamma), key=mx.random.key(4))
    sampling = mixed(*({"temp": 1.0, "delta": d} for d in delta), times=draws // 2)
    lengths = mx.arange(draws) % (gamma + 1)
    short, full = (
        acceptance.accept(logits, drafts, q, lengths, sampling, position_keys(draws, gamma + 1, 5))
        for q in (None, one_hot(drafts, vocab))
    )
    assert [a.tolist() for a in short] == [a.tolist() for a in full]


def test_a_rows_rule_does_not_depend_on_the_rules_of_other_rows():
    draws, gamma, vocab = 1000, 3, 5
    logits = mx.random.normal((draws, gamma + 1, vocab), key=mx.random.key(6))
    drafts = mx.random.randint(0, vocab, (draws, gamma), key=mx.random.key(7))
    q = mx.softmax(mx.random.normal((draws, gamma, vocab), key=mx.random.key(8)), axis=-1)
    lengths = mx.full(draws, gamma, mx.int32)

    def judged(delta):
        one = mixed(*({"temp": 1.0, "delta": d} for d in delta), times=draws // 2)
        accepted, tokens = acceptance.accept(
            logits, drafts, q, lengths, one, position_keys(draws, gamma + 1, 9)
        )
        own = mx.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        return list(zip(accepted.tolist(), own.tolist(), strict=True))

    together, singly, both = map(judged, ([0.0] * 2, [STRICT] * 2, [0.0, STRICT]))
    assert together != singly
    assert both[::2] == together[::2]
    assert both[1::2] == singly[1::2]


@pytest.mark.parametrize("temp", [0.5, 1.0])
def test_proposals_do_not_change_the_text(temp):
    draws, gamma, vocab = 500, 4, 6
    logits = mx.random.normal((draws, gamma + 1, vocab), key=mx.random.key(6))
    keys, sampling = position_keys(draws, gamma + 1, 9), settings(draws, temp=temp)
    alone = [
        acceptance.accept(logits[:, i : i + 1], None, None, none, sampling, keys[:, i : i + 1])[1]
        for none in [mx.zeros(draws, mx.int32)]
        for i in range(gamma + 1)
    ]
    own = mx.concatenate(alone, axis=1)
    noise = mx.random.randint(0, vocab, own.shape, key=mx.random.key(7))
    drafts = mx.where(mx.random.uniform(shape=own.shape, key=mx.random.key(8)) < 0.7, own, noise)
    accepted, tokens = acceptance.accept(
        logits, drafts[:, :-1], None, mx.full(draws, gamma, mx.int32), sampling, keys
    )
    for n, row, written in zip(accepted.tolist(), own.tolist(), tokens.tolist(), strict=True):
        assert written[: n + 1] == row[: n + 1]
    assert set(accepted.tolist()) == set(range(gamma + 1))


def test_a_draft_that_samples_with_the_same_numbers_is_mostly_kept():
    draws, vocab = 20_000, 6
    rng = np.random.default_rng(5)
    logits = rng.normal(size=vocab).astype(np.float32)
    q = mx.softmax(mx.array(logits + 0.5 * rng.normal(size=vocab).astype(np.float32)))
    p, keys = mx.softmax(mx.array(logits)), position_keys(draws, 2)
    x = sample(mx.broadcast_to(q, (draws, vocab)), fold(keys[:, 0], 0, OWN))
    check_draws(x, np.array(q))
    accepted, tokens = acceptance.accept(
        mx.broadcast_to(mx.array(logits), (draws, 2, vocab)),
        x[:, None],
        None,
        mx.ones(draws, mx.int32),
        settings(draws),
        keys,
    )
    check_draws(tokens[:, 0], np.array(p))
    distance = (mx.abs(p - q).sum() / 2).item()
    assert accepted.mean().item() > (1 - distance) / (1 + distance) - 0.01  # Daliri et al.
