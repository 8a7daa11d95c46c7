"""Training, and the trained pair's figures on held-out sentences."""

import shutil

import pytest

from decoder import SpeculativeDecoder
from demo.recipe import corpus, evaluate
from mlx_t5.backend import mx
from model import load


def test_rate_warms_up_and_decays_to_zero():
    pytest.importorskip("torch")
    from demo.recipe.learning import Shape, TrainingConfig, rate_factor

    config = TrainingConfig(
        Shape(8, 8, 1, 1, 1), examples=1, batch=1, relative_rate=1.0, warmup_steps=10
    )
    rates = [rate_factor(step, 100, config) for step in range(101)]
    assert rates[0] == 0.1 and rates[30] == 1.0 and rates[100] == 0.0
    assert rates[60:] == sorted(rates[60:], reverse=True)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    torch = pytest.importorskip("torch")
    from demo.recipe import learning

    config = learning.TrainingConfig(
        learning.Shape(32, 32, 1, 1, 1),
        examples=2 * learning.CHUNK,
        batch=learning.CHUNK // 3,
        relative_rate=1e-1,
        warmup_steps=2,
    )
    batch = learning.to_batch([([5, 6, 1], [7, 1]), ([8, 1], [9, 10, 1])])

    def trainer(folder):
        torch.manual_seed(0)
        folder.mkdir(exist_ok=True)
        return learning.Trainer("tiny", config, learning.make_model(config.shape, 16), folder)

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


def test_both_stages_write_a_model(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from demo.recipe import learning, train

    shape = learning.Shape(32, 32, 1, 1, 1)
    tiny = learning.TrainingConfig(shape, examples=8, batch=4, relative_rate=1e-2, warmup_steps=2)
    monkeypatch.setattr(train, "TARGET", tiny)
    monkeypatch.setattr(train, "DRAFT", shape)
    monkeypatch.setattr(train, "DRAFT_OPTIONS", ("--iters", "2", "--batch-size", "4"))
    monkeypatch.setattr(learning, "CHUNK", 20)
    shutil.copytree(evaluate.DEMO / "target", tmp_path / "tokenizer")
    options = ["--work-dir", str(tmp_path), "--check", "2", "--processes", "1"]
    assert train.main(["--stage", "target", *options]) == 0
    _, tokenizer = load(tmp_path / "target")
    assert tokenizer("I eat.").input_ids[-1] == 1

    shutil.copytree(evaluate.DEMO / "target", tmp_path / "target", dirs_exist_ok=True)
    assert train.main(["--stage", "draft", *options]) == 0
    found, written = (load(tmp_path / name)[0] for name in ("draft-found", "draft"))
    assert written.config.d_model == 32
    source, target = mx.array([[5, 6, 1]]), mx.array([[0, 7]])
    assert mx.array_equal(found(source, target), written(source, target))


def test_bundled_pair_meets_its_goals_on_a_small_held_out_sample():
    target, tokenizer = load(evaluate.DEMO / "target")
    draft, _ = load(evaluate.DEMO / "draft")
    decoder = SpeculativeDecoder(target, draft, tokenizer, num_draft=5)
    figures = {
        task: evaluate.run(decoder, evaluate.held_out(task, 40, "test"), 40)
        for task in corpus.SHARES
    }
    assert figures["translate"]["exact_match"] >= 0.9  # 95 % measured on many more
    assert figures["fix"]["exact_match"] >= 0.8
    accepted = sum(f["accepted"] for f in figures.values())
    assert 0.8 <= accepted / sum(f["drafted"] for f in figures.values()) < 1  # 0.89 on many more
