"""A model split over 2 or 4 ranks gives the texts, scores and vectors of a single rank.

Other ranks compute different decisions, as unlike machines may: `shared_models.sabotage`.
"""

import json

import numpy as np
import pytest

import shared_models
from launching import ROOT, finish, launch, needs_ring
from model import load

pytestmark = [needs_ring, pytest.mark.slow]
SCRIPT = ROOT / "tests/support/shared_models.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks") / "models"
    root.mkdir()
    shared_models.make(root)
    return root


@pytest.fixture(scope="module")
def alone(root):
    """Returns the results of a single rank by model."""
    draft, _ = load(root / "draft", "float32")
    made = {}
    for name in ("gated", "quantised", "half", "tied"):
        model, _ = load(root / name, shared_models.dtype_of(name))
        made[name] = json_like(shared_models.results(root, name, model, draft))
    return made


def json_like(found):
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module", params=[2, 4])
def found(request, root):
    """Returns the results of each of 2 or 4 ranks; 4 ranks run one model, as they are slow."""
    names = ["gated", "quantised", "half"] if request.param == 2 else ["tied"]
    _, err = finish(launch(request.param, str(SCRIPT), str(root), *names))
    files = [root / f"{rank}-of-{request.param}.json" for rank in range(request.param)]
    assert all(file.exists() for file in files), err
    return [json.loads(file.read_text()) for file in files]


def assert_alike(found, expected, tolerance=2e-4):
    """Asserts equal results: tokens exactly, other numbers up to rounding."""
    for name, values in expected.items():
        if name in ("logits", "beam_scores", "vectors", "scores"):
            for a, b in zip(found[name], values, strict=True):
                np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
        elif not (name == "exact" and None in (found[name], values)):  # refused on one side
            assert found[name] == values, name


def test_several_ranks_give_the_results_of_one_rank(alone, found):
    for name in found[0].keys() & alone.keys():
        if name == "half":  # parts are rounded to 16 bits before they are added
            assert_alike(found[0][name], {"logits": alone[name]["logits"]}, 0.05)
        else:
            assert_alike(found[0][name], alone[name])


def test_every_rank_computes_the_same_bits(found):
    assert all(each == found[0] for each in found[1:])


def test_each_half_block_and_the_head_need_one_collective(found):
    config = shared_models.SHAPE
    encoder, decoder = 2 * config["num_layers"], 3 * config["num_decoder_layers"] + 1
    for counts in found[0]["collectives"].values():
        assert counts == [encoder, 0, decoder]


def test_ranks_exchange_values(found):
    everybody = [[rank, "ä"] for rank in range(len(found))]
    assert all(each["answers"] == [everybody, True] for each in found)


def test_drafts_that_share_the_encoder_are_accepted_now_and_then(alone):
    """The comparisons of the two tests above thus cover accepted and rejected drafts."""
    for name, made in alone.items():
        _, drafted, accepted = zip(*made["shared encoder"], strict=True)
        assert 0 < sum(accepted) < sum(drafted), name
