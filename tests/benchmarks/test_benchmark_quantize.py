"""`quantize`: it judges the models that convert.py writes, and its figures come from them."""

import json
import math

import pytest

import benchmark
from benchmarks.quantize import (
    BITS,
    PLAIN,
    _sums,
    difference,
    group_size,
    quantized,
    recipes,
)
from convert import convert
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.quantization import PREDICATES, Quantization, Recipe
from mlx_t5.cli.models import BUNDLED
from model import load

TEXTS = [([21, 9, 300, 1], [0, 5, 77, 9]), ([40, 1], [0, 8, 2, 700, 31, 6])]


@pytest.fixture(scope="module")
def target():
    return load(BUNDLED / "target", "float32")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        {"bits": 3},
        {"bits": 8, "group_size": 32},
        {"mode": "mxfp4"},
        {"mode": "mxfp8"},
        {"mode": "nvfp4"},
        {"predicate": "vo_4_5"},
        {"predicate": "vo_4_5+embed_8"},
        None,
    ],
    ids=str,
)
def test_a_model_in_memory_is_the_one_that_convert_writes(target, tmp_path, recipe):
    names = {"bits": "q_bits", "group_size": "q_group_size", "mode": "q_mode"}
    options = {names.get(name, "quant_predicate"): value for name, value in (recipe or {}).items()}
    folder = convert(BUNDLED / "target", tmp_path / "out", quantize=bool(recipe), **options)
    written, _ = load(folder, "float32")
    made = quantized(target, Recipe.from_options(**recipe) if recipe else None)
    both = difference(made, written, TEXTS)
    assert both.error < 1e-4 and both.top_1 == 1.0
    if recipe:  # far closer to each other than to the model that was quantised
        assert difference(made, target, TEXTS).error > 50 * both.error


def test_nothing_is_lost_without_quantising_and_the_original_is_left_alone(target):
    before = dict(tree_flatten(target.parameters()))
    same = difference(quantized(target, None), target, TEXTS)
    assert (same.error, same.kl, same.top_1) == (0.0, 0.0, 1.0)
    quantized(target, Recipe.from_options(2))
    after = dict(tree_flatten(target.parameters()))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_texts_of_other_lengths_in_the_batch_change_nothing(target):
    model = quantized(target, Recipe.from_options(3))
    both = difference(model, target, TEXTS)
    apart = [difference(model, target, [text]) for text in TEXTS]
    mean = sum(one.kl * len(fed) for one, (_, fed) in zip(apart, TEXTS, strict=True)) / 10
    assert both.kl == pytest.approx(mean, rel=1e-3)


def test_the_sums_of_a_small_example():
    """Two positions, of which the second is padding; a shift of all logits is no difference."""
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    right = mx.log(mx.array([[p, [1.0, 1.0, 1.0]]]))
    other = mx.log(mx.array([[q, [0.9, 0.05, 0.05]]])) + 3.0
    squared_error, square, kl, same = _sums(right, other, mx.array([[1, 0]])).tolist()
    log2 = math.log(2)
    assert squared_error == pytest.approx(2 * log2**2, rel=1e-5)
    assert square == pytest.approx(log2**2 * (4 + 1 + 1) / 9, rel=1e-5)
    assert kl == pytest.approx(0.5 * log2 - 0.25 * log2, rel=1e-5)
    assert same == 0.0
    assert _sums(right, right + 1.0, mx.array([[1, 1]])).tolist()[3] == 2.0


def test_recipes_fit_the_model(target):
    draft = load(BUNDLED / "draft", "float32")[0]
    assert (group_size(target), group_size(draft)) == (64, 32)  # rows of 96
    every = recipes(target)
    assert every[PLAIN] is None and {*PREDICATES} - {"embed_8", "layers"} < set(every)
    assert every["4 bits, embed_8"].for_layer("shared.weight", (64, 64)).bits == 8
    assert every["vo_4_5"] == Recipe(Quantization(64, 4, "affine"), Quantization(64, 5, "affine"))
    assert recipes(draft)["4 bits"] == Recipe(Quantization(32, 4, "affine"))


@pytest.mark.slow
def test_a_small_run(capsys, tmp_path):
    file = tmp_path / "x.json"
    argv = ["quantize", "--task", "translate", "--count", "2", "--num-draft", "3"]
    assert benchmark.main([*argv, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "translate: 2 prompts" in out and "| 4 bits | 4,678,656 | 37.2% |" in out
    (table,) = json.loads(file.read_text())["tables"]
    targets = {row["way"]: row for row in table["targets"]}
    plain, eight, three = (targets[way] for way in (PLAIN, "8 bits", "3 bits"))
    assert (plain["error"], plain["kl"], plain["exact_match_lossless"]) == (0.0, 0.0, 100.0)
    assert plain["of_bfloat16"] == 1.0
    by_bits = [targets[f"{bits} bits"] for bits in BITS]  # fewer bits lose more
    for name in ("error", "kl"):
        assert [row[name] for row in by_bits] == sorted(row[name] for row in by_bits)
    assert 0 < eight["error"] < 0.02 < 0.2 < by_bits[-1]["error"]
    assert eight["bytes"] > three["bytes"]
    drafts = {row["way"]: row for row in table["drafts"]}
    assert all(row["exact_match_lossless"] == 100.0 for row in drafts.values())
    assert drafts[PLAIN]["acceptance_rate"] == plain["acceptance_rate"]
    assert drafts["2 bits"]["acceptance_rate"] != plain["acceptance_rate"]
