"""Tests drafts that share their target's encoder in main.py and benchmark.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_programs import MlxT5
from decoder import SpeculativeDecoder
from devices import exact_or_refused
from mlx_t5.backend import mx
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft
from model import load

PROMPTS = ["fix grammar: She have two cat.", "translate English to French: I have two cats."]
ASKED = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
OPTIONS = ["--model", str(BUNDLED / "target"), "--dtype", "float32", "--max-tokens", "25", *ASKED]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Returns the folder of a draft that shares the bundled target's encoder."""
    target, _ = load(BUNDLED / "target")
    place = tmp_path_factory.mktemp("drafts") / "draft"
    return save_draft(shared_draft(target, 2), BUNDLED / "target", place)


@pytest.fixture(scope="module")
def own(tmp_path_factory, draft):
    """Returns a folder of `draft` with its own vocabulary, which lacks a token of each text."""
    target, tokenizer = load(BUNDLED / "target", "float32")
    model, _ = load(draft, shared_with=target)
    texts = [r.tokens for r in SpeculativeDecoder(target, None, tokenizer).generate(PROMPTS, 25)]
    ids = {1}.union(*texts) - {text[2] for text in texts}
    narrow(model, np.array(sorted(ids)))
    return save_draft(model, BUNDLED / "target", tmp_path_factory.mktemp("drafts") / "own")


@pytest.fixture(params=["draft", "own"])
def either(request):
    """Returns one of the two drafts."""
    return request.getfixturevalue(request.param)


@pytest.mark.slow
@exact_or_refused
def test_main_writes_what_the_target_writes_alone(run, either):
    draft = either
    _, expected, _ = run(*OPTIONS, "--regular-decode", "--json")
    texts = [json.loads(line)["text"] for line in expected.splitlines()]
    for name, more in ((f"{draft}+lookup", []), (str(draft), ["--exact"])):
        draft_options = ["--draft-model", name, "--num-draft", "5", "--json", *more]
        status, out, err = run(*OPTIONS, *draft_options)
        assert status == 0, err
        records = [json.loads(line) for line in out.splitlines()]
        assert [r["text"] for r in records] == texts
        assert sum(r["stats"]["accepted"] for r in records) > 10
        assert f"draft {draft}" in err.splitlines()[0]


def test_another_program_gets_a_whole_model(draft, own, tmp_path):
    project = MlxT5(str(BUNDLED / "target"), str(own), "float32")
    with pytest.raises(UserError, match="own has a vocabulary of its own, which other prog"):
        project.folders(str(tmp_path))
    project = MlxT5(str(BUNDLED / "target"), str(draft), "float32")
    target, whole = project.folders(str(tmp_path))
    assert target == str(BUNDLED / "target") and Path(whole).parent == tmp_path
    ids, written = mx.array([[5, 9, 3, 1]]), mx.array([[0, 7, 8]])
    shared, _ = load(draft, shared_with=load(target, "float32")[0])
    assert mx.array_equal(load(whole, "float32")[0](ids, written), shared(ids, written))
