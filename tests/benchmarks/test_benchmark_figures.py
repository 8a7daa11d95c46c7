"""What passes cost, and every figure of a variant of decoding, by the letter."""

from collections import Counter

import pytest

from benchmarks import figures
from benchmarks.figures import CostMeter, PairCosts, weights_read
from benchmarks.subject import Run
from mlx_t5.backend import mx, nn
from mlx_t5.drafting.costs import CHAIN, Costs
from mlx_t5.engine.rows import Result, Speculation, Stats
from mlx_t5.network.config import T5Config
from mlx_t5.timing import Ratio, Timed
from model import T5

COSTS = PairCosts({1: 2.0, 3: 3.0}, {1: 1.0, 3: 1.5}, 0.25)


def run(tokens, calls, drafted=(), accepted=(), decode=1.0, widths=(), draft_passes=0):
    """A turn of one prompt; `drafted` and `accepted` count proposals by their place in a step."""
    stats = Stats(
        target_calls=calls,
        tokens_per_call=(len(tokens) + 1) / calls,
        drafted=sum(drafted),
        accepted=sum(accepted),
        encode_seconds=0.5,
        decode_seconds=decode,
        speculation=Speculation(
            drafted_by_position=list(drafted), accepted_by_position=list(accepted)
        ),
    )
    return Run([Result(None, tokens, [], "stop", stats)], Counter(dict(widths)), draft_passes)


def timed(seconds, rows):
    tokens = [[sum(len(r.tokens) + 1 for r in turn.results) for turn in row] for row in rows]
    return Timed(seconds, tokens, rows)


REGULAR = timed([[4.0, 4.0]] * 2, [[run([5, 6, 7], 4), run([8, 9, 9], 4)]] * 2)


def test_the_figures_of_a_way_are_means_over_its_repeats():
    first = [run([5, 6, 7], 2, (2, 2), (1, 1)), run([8, 9, 9], 2, (2, 2), (1, 1))]
    second = [run([5, 6, 7], 1, (1, 1, 1), (1, 1, 1)), run([8, 9, 9], 1, (1, 1, 1), (1, 1, 0))]
    row = figures.figures(timed([[1.0, 1.0], [3.0, 3.0]], [first, second]), REGULAR)
    assert (row["decided"], row["target_calls"], row["drafted"]) == (8, 3, 7)
    assert (row["accepted"], row["acceptance_rate"]) == (4.5, 9 / 14)
    assert row["tokens_per_call"] == 8 / 3 and row["different"] == 0
    assert row["tokens_per_second"] == 2.0 and row["speed_up"] == Ratio(8 / 3, 4 / 3, 4.0)
    # Two steps of the first repeat kept none and two both; of the second one kept 3, the other 2.
    assert row["steps_by_accepted"] == [1.0, 0.0, 1.5, 0.5]
    row = figures.figures(REGULAR, REGULAR)  # steps without a proposal accepted none
    assert row["steps_by_accepted"] == [8.0] and row["acceptance_rate"] is None


def test_a_text_that_differs_in_one_repeat_counts_once():
    good, bad = ([run([5, 6, last], 4), run([8, 9, 9], 4)] for last in (7, 0))
    for rows, different in (([good, bad], 1), ([bad, bad], 1), ([good, good], 0)):
        other = timed([[1.0, 1.0]] * 2, rows)
        assert figures.figures(other, REGULAR)["different"] == different
    assert figures.figures(other, REGULAR, greedy=False)["different"] is None


def test_theory_is_of_decoding_and_follows_from_acceptance_and_costs():
    regular = timed([[8.0]] * 3, [[run([5, 6, 7], 4, decode=7.5, widths={1: 4})]] * 3)
    outcomes = [[run([5, 6, 7], 2, (2, 2), (2, 0), s, {3: 2}, 4)] for s in (1.5, 2.5, 3.5)]
    row = figures.beside_theory(timed([[2.0], [3.0], [4.0]], outcomes), regular, COSTS)
    alpha = 2 / 4  # all first proposals kept, no second one
    assert (row["alpha"], row["c"]) == (alpha, 0.25)
    # (1 - alpha^3) / (1 - alpha) tokens for two draft passes and one over three positions
    assert row["predicted"] == pytest.approx((1 - alpha**3) / (1 - alpha) / (2 * 0.25 + 1.5))
    assert row["decode_speed_up"] == Ratio(3.0, 7.5 / 3.5, 5.0)
    # Copies cost no draft pass.
    copied = timed([[1.0]], [[run([5, 6, 7], 2, (2,), (2,), widths={3: 2})]])
    row = figures.beside_theory(copied, copied, COSTS)
    assert row["c"] == 0.0 and row["predicted"] == pytest.approx(3 / 1.5)


def test_a_lucky_repeat_does_not_make_a_number_the_best():
    def row(*seconds):
        return {"seconds": [[s] for s in seconds], "tokens": [[1]] * len(seconds)}

    steady, lucky = row(1.0, 1.0), row(0.5, 2.0)
    # By its first repeat the lucky one is chosen, and in the second it is slow; then as before.
    assert figures.of_best(steady, [steady, lucky]) == pytest.approx((2.0 + 1.0) / 2)
    assert figures.of_best(row(0.8, 0.8), [steady]) == pytest.approx(1.25)
    assert figures.of_best(row(2.0), [row(1.0)]) == pytest.approx(0.5), "a single repeat"


def test_costs_are_measured_among_the_decoding():
    class Meter:
        def measure(self):
            return Costs({1: 2.0, 2: 3.0}, {1: 0.5})

    regular = run([5, 6, 7], 4)
    timed, costs = figures.measure({"regular": lambda turn: regular}, 2, 3, Meter())
    assert list(timed) == ["regular"] and timed["regular"].tokens == [[4, 4]] * 3
    assert costs == PairCosts({1: 2.0, 2: 3.0}, {1: 1.0, 2: 1.5}, 0.25)
    assert figures.measure({"regular": lambda turn: regular}, 1, 1)[1] is None


def test_costs_are_medians_in_units_of_a_pass_over_one_position():
    rounds = [
        Costs({1: 2.0, 2: 3.0}, {1: 1.0}),
        Costs({1: 1.0, 2: 9.0}, {1: 0.5}),
        Costs({1: 4.0, 2: 5.0}, {1: 0.25}),
    ]
    assert PairCosts.from_rounds(rounds) == PairCosts({1: 2.0, 2: 5.0}, {1: 1.0, 2: 2.5}, 0.25)


SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
CONFIG = T5Config(vocab_size=32, num_decoder_layers=3, **SIZES)


@pytest.mark.parametrize(("num_draft", "longest"), [(5, 16), (69, 70)])
def test_a_round_times_every_width_and_a_chain_of_draft_passes(num_draft, longest):
    target, ticks, widths = T5(CONFIG), iter(range(1000)), []
    decode = target.decode

    def watched(tokens, cache, offsets):
        widths.append(tokens.shape[1])
        return decode(tokens, cache, offsets)

    target.decode = watched
    meter = CostMeter(target, T5(CONFIG), 5, num_draft, clock=lambda: next(ticks))
    assert meter.measure() == Costs(dict.fromkeys(range(1, longest + 1), 1), {1: 1 / CHAIN})
    assert widths == list(range(1, longest + 1))


def test_the_weights_that_a_pass_reads():
    inner = 2 * 4
    attention = 4 * 8 * inner
    # Self-attention whole, of cross-attention q and o, feed-forward, three norms; final norm; bias.
    layer = attention + attention // 2 + 2 * 8 * 16 + 3 * 8
    expected = 3 * layer + 8 + 32 * 2 + 32 * 8
    # A head of its own is read instead of the embedding, which is only looked up.
    for model in (T5(CONFIG, separate_head=True), T5(CONFIG)):
        assert weights_read(model) == 4 * expected
    model.set_dtype(mx.bfloat16)
    assert weights_read(model) == 2 * expected
    model = T5(T5Config(vocab_size=32, **{**SIZES, "d_model": 64, "d_ff": 64, "num_heads": 16}))
    before = weights_read(model)
    nn.quantize(model, bits=4, class_predicate=lambda path, module: isinstance(module, nn.Linear))
    assert 0.1 * before < weights_read(model) < 0.25 * before
