"""Tests the folders of drafts, and their use in main.py and by other programs."""

import json

import numpy as np
import pytest

import checkpoints
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.benchmarks.peer_programs import MlxT5
from mlx_t5.checkpoints.checkpoint import ENTRY
from mlx_t5.checkpoints.reading import read_weights, type_name
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft


@pytest.fixture
def target(tmp_path):
    """Returns a target's folder."""
    return checkpoints.tiny(tmp_path / "target")


def stored(folder):
    return {name: type_name(tensor.dtype) for name, tensor in read_weights(folder)[0].items()}


def test_a_folder_has_the_decoder_and_says_what_it_belongs_to(target, tmp_path):
    folder = convert(target, tmp_path / "mlx", "bfloat16")
    config = json.loads((folder / "config.json").read_text())
    config["converted_from"] = {"model": "me/my-t5"}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = load(folder, "float32")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modules.json").write_text("[]")
    path = save_draft(shared_draft(model, 1), folder, tmp_path / "draft")
    written = json.loads((path / "config.json").read_text())
    assert written.pop(ENTRY) == {"model": "me/my-t5"}
    assert written.pop("num_decoder_layers") == 1
    assert written.items() <= config.items() and "converted_from" not in written
    types = stored(path)  # the types of the target's folder
    assert set(types.values()) == {"bfloat16"}
    assert types.keys() == dict(tree_flatten(shared_draft(model, 1).parameters())).keys()
    assert (path / "tokenizer_config.json").exists() and not (path / "modules.json").exists()


def test_a_type_can_be_chosen(target, tmp_path):
    model, _ = load(target)
    path = save_draft(shared_draft(model, 1), target, tmp_path / "draft", dtype="float16")
    types = stored(path)
    wide = {name for name, kind in types.items() if kind == "float32"}
    assert wide == {name for name in types if ".wo." in name}
    draft, _ = load(path, shared_with=load(target, "float16")[0])
    assert draft.dtype == draft.decoder.norm.weight.dtype == mx.float16
    assert mx.all(mx.isfinite(draft(mx.array([[3, 1]]), mx.array([[0, 5]]))))


def test_a_draft_with_an_encoder_of_its_own_is_written_whole(target, tmp_path):
    model, _ = load(target)
    again, _ = load(save_draft(model, target, tmp_path / "draft"))
    weights, expected = (dict(tree_flatten(m.parameters())) for m in (again, model))
    assert weights.keys() == expected.keys()
    assert all(mx.array_equal(weights[name], expected[name]) for name in weights)


def test_main_writes_what_the_target_writes_alone_and_others_get_a_whole_draft(run, tmp_path):
    """The draft's own vocabulary lacks a token of the text."""
    model, prompt = str(BUNDLED / "target"), "translate English to French: I have two cats."
    target, tokenizer = load(model, "float32")
    regular = SpeculativeDecoder(target, None, tokenizer).generate(prompt, max_tokens=25)
    draft = shared_draft(target, 2)
    whole = save_draft(draft, BUNDLED / "target", tmp_path / "draft")
    narrow(draft, np.array(sorted({1, *regular.tokens} - {regular.tokens[2]})))
    own = str(save_draft(draft, BUNDLED / "target", tmp_path / "own"))
    options = ["--model", model, "--dtype", "float32", "--max-tokens", "25", "--num-draft", "5"]
    status, out, err = run(*options, "--draft-model", own, "--prompt", prompt, "--json")
    record = json.loads(out)
    assert status == 0 and f"draft {own}" in err.splitlines()[0]
    assert record["text"] == regular.text and record["stats"]["accepted"] > 3
    with pytest.raises(UserError, match="own has a vocabulary of its own, which other prog"):
        MlxT5(model, own, "float32").folders("unused")
    _, alone = MlxT5(model, str(whole), "float32").folders(str(tmp_path / "scratch"))
    ids, written = mx.array([[5, 9, 3, 1]]), mx.array([[0, 7, 8]])
    shared, _ = load(whole, shared_with=target)
    assert mx.array_equal(load(alone, "float32")[0](ids, written), shared(ids, written))
