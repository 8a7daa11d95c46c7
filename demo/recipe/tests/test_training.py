"""Training, and the trained pair's figures on held-out sentences."""

import pytest

from decoder import SpeculativeDecoder
from demo.recipe import evaluate
from model import load


def test_counting_accepted_tokens():
    pytest.importorskip("torch")
    from demo.recipe.distill import count_accepted

    assert count_accepted([True] * 6, 5) == (5, 5)  # five drafted, the sixth is the target's own
    assert count_accepted([True, False, True, True], 5) == (3, 6)
    assert count_accepted([False] * 3, 2) == (0, 5)


def test_rate_warms_up_and_decays_to_zero():
    pytest.importorskip("torch")
    from demo.recipe.learning import Recipe, rate_factor

    recipe = Recipe(8, 8, 1, 1, 1, examples=1, batch=1, relative_rate=1.0, warmup_steps=10)
    rates = [rate_factor(step, 100, recipe) for step in range(101)]
    assert rates[0] == 0.1 and rates[30] == 1.0 and rates[100] == 0.0
    assert rates[60:] == sorted(rates[60:], reverse=True)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    torch = pytest.importorskip("torch")
    from demo.recipe import learning

    recipe = learning.Recipe(
        32,
        32,
        1,
        1,
        1,
        examples=2 * learning.CHUNK,
        batch=learning.CHUNK // 3,
        relative_rate=1e-1,
        warmup_steps=2,
    )
    batch = learning.to_batch([([5, 6, 1], [7, 1]), ([8, 1], [9, 10, 1])])

    def trainer(folder):
        torch.manual_seed(0)
        folder.mkdir(exist_ok=True)
        return learning.Trainer("tiny", recipe, learning.make_model(recipe, 16), folder)

    def run(one):
        one.run_chunk(learning.token_loss(one.model, batch) for _ in range(3))
        return one

    whole = run(run(trainer(tmp_path / "whole")))
    run(trainer(tmp_path / "halves"))
    second = trainer(tmp_path / "halves")
    assert (second.step, second.chunk, second.done) == (3, 1, False)
    run(second)
    assert second.done
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bundled_pair_meets_its_goals_on_a_small_held_out_sample():
    target, tokenizer = load(evaluate.DEMO / "target")
    draft, _ = load(evaluate.DEMO / "draft")
    decoder = SpeculativeDecoder(target, draft, tokenizer, num_draft=5)
    figures = {
        task: evaluate.run(decoder, evaluate.held_out(task, 60, "test"), 30)
        for task in evaluate.TASKS
    }
    assert figures["translate"]["exact_match"] >= 0.9  # 95 % measured on many more
    assert figures["fix"]["exact_match"] >= 0.8
    accepted = sum(f["accepted"] for f in figures.values())
    assert 0.6 <= accepted / sum(f["drafted"] for f in figures.values()) <= 0.9
