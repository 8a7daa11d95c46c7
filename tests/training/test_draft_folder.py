"""Tests draft_folder.py: the folders of drafts, and refused paths."""

import json

import pytest

import checkpoints
from convert import convert
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.reading import read_weights, type_name
from mlx_t5.errors import UserError
from mlx_t5.network.sharing import ENTRY, shared_draft
from mlx_t5.training.draft_folder import save_draft
from model import load


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


def test_an_existing_folder_is_not_overwritten(target, tmp_path):
    draft = shared_draft(load(target)[0], 1)
    path = save_draft(draft, target, tmp_path / "draft")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    refused = {path: "exists; replace it", target: "is the source", "~no/x": "nowhere"}
    for place, match in refused.items():
        with pytest.raises(UserError, match=match):
            save_draft(draft, target, place)
    with pytest.raises(UserError, match="cannot read .*config.json"):
        save_draft(draft, tmp_path, tmp_path / "other")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft", "target"]
    assert save_draft(draft, target, path, standalone=True, overwrite=True) == path
    assert load(path)[0].config.num_decoder_layers == 1


def test_converting_a_draft_is_refused(target, tmp_path):
    path = save_draft(shared_draft(load(target)[0], 1), target, tmp_path / "draft")
    with pytest.raises(UserError, match="a draft, ready to use: give its folder as --draft-model"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
