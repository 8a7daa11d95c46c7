"""Tests drafts that share their target's encoder in main.py and benchmark.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peer_programs import MlxT5
from benchmarks.subject import Subject
from benchmarks.workload import BOTH, DRAFT, REGULAR
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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--model", "DRAFT"],
            "DRAFT is a draft for target and uses its encoder: give it as --draft-model",
        ),
        (
            ["--model", str(BUNDLED / "draft"), "--draft-model", "DRAFT"],
            "DRAFT is a draft for target, and the target has another shape; give it with its own",
        ),
    ],
)
def test_one_line_says_which_target_is_needed(run, draft, options, line):
    status, out, err = run(*(option.replace("DRAFT", str(draft)) for option in options))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {line.replace('DRAFT', str(draft))}")


def test_benchmarks_measure_the_draft_and_export_a_whole_model(either, draft, tmp_path):
    subject = Subject.load(str(BUNDLED / "target"), str(either), "float32")
    regular, *decoders = (subject.decoder(way, 3) for way in (REGULAR, DRAFT, BOTH))
    expected = [result.tokens for result in regular.generate(PROMPTS, max_tokens=25)]
    for decoder in decoders:
        results = decoder.generate(PROMPTS, max_tokens=25)
        assert [result.tokens for result in results] == expected
        assert all(result.stats.accepted for result in results)
    project = MlxT5(str(BUNDLED / "target"), str(either), "float32")
    if either != draft:
        with pytest.raises(UserError, match="own has a vocabulary of its own, which other prog"):
            project.folders(str(tmp_path))
        return
    target, whole = project.folders(str(tmp_path))
    assert target == str(BUNDLED / "target") and Path(whole).parent == tmp_path
    ids, written = mx.array([[5, 9, 3, 1]]), mx.array([[0, 7, 8]])
    assert mx.array_equal(load(whole, "float32")[0](ids, written), subject.draft(ids, written))
