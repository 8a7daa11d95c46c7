"""Tests the costs of passes and every figure of a decoding variant, with exact values."""

from types import SimpleNamespace

from benchmarks import figures
from benchmarks.figures import pair_costs
from benchmarks.passes import CHAIN
from benchmarks.subject import Subject
from mlx_t5.backend import mx, nn
from mlx_t5.engine.rows import Result, Stats
from mlx_t5.network.config import T5Config
from mlx_t5.timing import Ratio, Timed
from model import T5


def text(tokens, steps):
    """Returns a turn of one prompt; `steps`: the tokens proposed and accepted in each step."""
    calls = {"tokens_per_call": (len(tokens) + 1) / len(steps)}
    stats = Stats(**calls)
    for step in steps:
        stats.count(*step, "draft")
    return [Result(None, tokens, [], "stop", stats)]


def timed(seconds, rows):
    tokens = [[sum(len(r.tokens) + 1 for r in turn) for turn in row] for row in rows]
    return Timed(seconds, tokens, rows)


NONE = [(0, 0)] * 4  # regular decoding
REGULAR = timed([[4.0, 4.0]] * 2, [[text([5, 6, 7], NONE), text([8, 9, 9], NONE)]] * 2)


def test_the_figures_of_a_variant_are_means_over_its_repeats():
    first = [text(tokens, [(2, 2), (2, 0)]) for tokens in ([5, 6, 7], [8, 9, 9])]
    second = [text([5, 6, 7], [(3, 3)]), text([8, 9, 9], [(3, 2)])]
    row = figures.figures(timed([[1.0, 1.0], [3.0, 3.0]], [first, second]), REGULAR)
    assert (row["decided"], row["target_calls"], row["drafted"]) == (8, 3, 7)
    assert (row["accepted"], row["acceptance_rate"]) == (4.5, 9 / 14)
    assert row["tokens_per_call"] == 8 / 3 and row["different"] == 0
    assert row["tokens_per_second"] == 2.0 and row["speed_up"] == Ratio(8 / 3, 4 / 3, 4.0)
    assert row["steps_by_accepted"] == [1.0, 0.0, 1.5, 0.5]
    row = figures.figures(REGULAR, REGULAR)  # steps without proposals accept nothing
    assert row["steps_by_accepted"] == [8.0] and row["acceptance_rate"] is None


def test_a_text_that_differs_in_one_repeat_counts_once():
    good, bad = ([text([5, 6, last], NONE), text([8, 9, 9], NONE)] for last in (7, 0))
    for rows, different in (([good, bad], 1), ([bad, bad], 1), ([good, good], 0)):
        other = timed([[1.0, 1.0]] * 2, rows)
        assert figures.figures(other, REGULAR)["different"] == different


SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
CONFIG = T5Config(vocab_size=32, num_decoder_layers=3, **SIZES)


def test_every_width_and_a_chain_of_draft_passes_are_timed():
    ticks = iter(range(1000))
    subject = Subject(T5(CONFIG), T5(CONFIG), SimpleNamespace(encode=list))
    costs = pair_costs(subject, ["abcde"], [1, 2, 3], 0.0, 3, lambda: next(ticks))
    assert costs.seconds == dict.fromkeys([1, 2, 3], 1.0) == costs.v and costs.c == 1 / CHAIN


def test_weights_read_counts_the_bytes_of_one_pass():
    inner = 2 * 4
    attention = 4 * 8 * inner
    # All of self-attention, q and o of cross-attention, the feed-forward and three norms.
    layer = attention + attention // 2 + 2 * 8 * 16 + 3 * 8
    expected = 3 * layer + 32 * 8
    # A pass reads a separate head, but only looks up a few rows of the embedding.
    for model in (T5(CONFIG, separate_head=True), T5(CONFIG)):
        assert model.weights_read().bytes == 4 * expected
    model.set_dtype(mx.bfloat16)
    assert model.weights_read().bytes == 2 * expected
    model = T5(T5Config(vocab_size=32, **{**SIZES, "d_model": 64, "d_ff": 64, "num_heads": 16}))
    before = model.weights_read().bytes
    nn.quantize(model, bits=4, class_predicate=lambda path, module: isinstance(module, nn.Linear))
    assert 0.1 * before < model.weights_read().bytes < 0.25 * before
