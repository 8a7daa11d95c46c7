"""What passes cost: which are timed, what they read; the times themselves are not judged."""

import pytest

from benchmarks.costs import OFFSET, CostMeter, PairCosts, Round, weights_read
from mlx_t5.backend import mx, nn
from mlx_t5.drafting.costs import CHAIN
from mlx_t5.network.config import T5Config
from model import T5

SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
CONFIG = T5Config(vocab_size=32, num_decoder_layers=3, **SIZES)


def test_costs_are_medians_in_units_of_a_pass_over_one_position():
    rounds = [
        Round({1: 2.0, 2: 3.0}, 1.0),
        Round({1: 1.0, 2: 9.0}, 0.5),
        Round({1: 4.0, 2: 5.0}, 0.25),
    ]
    assert PairCosts.from_rounds(rounds) == PairCosts({1: 2.0, 2: 5.0}, {1: 1.0, 2: 2.5}, 0.25)


@pytest.mark.parametrize(("num_draft", "longest"), [(5, 16), (69, 70)])
def test_a_round_times_every_width_and_a_chain_of_draft_passes(num_draft, longest):
    target: list[tuple[int, int]] = []
    draft: list[tuple[int, int]] = []
    ticks = iter(range(1000))
    meter = CostMeter(T5(CONFIG), T5(CONFIG), 5, num_draft, clock=lambda: next(ticks))

    def watched(function, calls):
        def run(tokens, cache, offsets):
            calls.append((tokens.shape[1], offsets[0]))
            return function(tokens, cache, offsets)

        return run

    meter.target.decode, meter.step = (
        watched(meter.target.decode, target),
        watched(meter.step, draft),
    )
    assert meter.measure() == Round(dict.fromkeys(range(1, longest + 1), 1), 1 / CHAIN)
    assert target == [(width, OFFSET) for width in range(1, longest + 1)]
    assert draft == [(1, OFFSET + i) for i in range(CHAIN)]


def test_the_weights_that_a_pass_reads():
    inner = 2 * 4
    attention = 4 * 8 * inner
    # Self-attention whole, of cross-attention q and o, feed-forward, three norms; final norm; bias.
    layer = attention + attention // 2 + 2 * 8 * 16 + 3 * 8
    expected = 3 * layer + 8 + 32 * 2 + 32 * 8
    assert weights_read(T5(CONFIG)) == 4 * expected
    # A head of its own is read instead of the embedding, which is only looked up.
    assert weights_read(T5(CONFIG, separate_head=True)) == 4 * expected
    model = T5(CONFIG)
    model.set_dtype(mx.bfloat16)
    assert weights_read(model) == 2 * expected


def test_the_weights_of_a_quantised_model():
    model = T5(T5Config(vocab_size=32, **{**SIZES, "d_model": 64, "d_ff": 64, "num_heads": 16}))
    before = weights_read(model)
    nn.quantize(model, bits=4, class_predicate=lambda path, module: isinstance(module, nn.Linear))
    assert 0.1 * before < weights_read(model) < 0.25 * before
