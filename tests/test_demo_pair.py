"""The demonstration's training, and the trained pair as it is bundled."""

import json
import math
from pathlib import Path

import pytest

from decoder import SpeculativeDecoder
from demo import corpus
from model import load

DEMO = Path(__file__).resolve().parents[1] / "demo"

# -- training ------------------------------------------------------------------------------------


def test_counting_accepted_tokens():
    pytest.importorskip("torch")
    from demo.distill import count_accepted

    assert count_accepted([True] * 6, 5) == (5, 5)  # five drafted, the sixth is the target's own
    assert count_accepted([True, False, True, True], 5) == (3, 6)
    assert count_accepted([False] * 3, 2) == (0, 5)


def test_rate_warms_up_and_decays_to_zero():
    pytest.importorskip("torch")
    from demo.learning import Recipe, rate_factor

    recipe = Recipe(8, 8, 1, 1, 1, examples=1, batch=1, relative_rate=1.0, warmup_steps=10)
    rates = [rate_factor(step, 100, recipe) for step in range(101)]
    assert rates[0] == 0.1 and rates[30] == 1.0 and rates[100] == 0.0
    assert rates[60:] == sorted(rates[60:], reverse=True)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    torch = pytest.importorskip("torch")
    from demo import learning

    recipe = learning.Recipe(32, 32, 1, 1, 1, examples=2 * learning.CHUNK,
                             batch=learning.CHUNK // 3, relative_rate=1e-1, warmup_steps=2)
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


# -- the trained pair ----------------------------------------------------------------------------


def parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as weights:
        return sum(math.prod(weights.get_slice(n).get_shape()) for n in weights.keys())


@pytest.mark.parametrize(("name", "limit"), [("target", 10_000_000), ("draft", 1_000_000)])
def test_bundled_models_are_small(name, limit):
    assert parameters(DEMO / name) <= limit
    assert sum(f.stat().st_size for f in (DEMO / name).iterdir()) <= 20_000_000
    config = json.loads((DEMO / name / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"], config["d_kv"]) == (0, 1, 64)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_bundled_tokenizer_keeps_any_text(name):
    import sentencepiece

    _, tokenizer = load(DEMO / name)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(DEMO / name / "spiece.model"))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for text in ("Où est l'été ? 漢字 😀 Ω naïve <b>", corpus.DEFAULT_SENTENCE, "ça \u0416"):
        ids = tokenizer(text).input_ids
        assert ids == [*reference.encode(text), 1]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_bundled_pair_translates_the_default_sentence_and_corrects_it():
    target, tokenizer = load(DEMO / "target")
    draft, _ = load(DEMO / "draft")
    decoder = SpeculativeDecoder(target, draft, tokenizer)
    french_text, fixed = decoder.generate([
        corpus.TRANSLATE + corpus.DEFAULT_SENTENCE,
        corpus.FIX + "He eat two apple on the kitchen every morning."], max_tokens=100)
    assert french_text.text == ("Allons au magasin et achetons des provisions, notamment des "
                                "œufs, des avocats et du pain.")
    assert french_text.stats.accepted > 0
    assert fixed.text.startswith("He eats two apples")


def test_bundled_pair_meets_its_goals_on_a_small_held_out_sample():
    from demo import evaluate

    target, tokenizer = load(DEMO / "target")
    draft, _ = load(DEMO / "draft")
    decoder = SpeculativeDecoder(target, draft, tokenizer, num_draft=5)
    figures = {task: evaluate.run(decoder, evaluate.held_out(task, 60, "test"), 30)
               for task in evaluate.TASKS}
    assert figures["translate"]["exact_match"] >= 0.9  # 95 % measured on many more
    assert figures["fix"]["exact_match"] >= 0.8
    accepted = sum(f["accepted"] for f in figures.values())
    assert 0.6 <= accepted / sum(f["drafted"] for f in figures.values()) <= 0.9
