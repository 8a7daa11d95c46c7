"""Tests draft_vocabulary.py: small heads, their folders, and refused tables."""

import json
import shutil

import numpy as np
import pytest

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.network.draft_vocabulary import narrow, with_all_tokens
from mlx_t5.network.sharing import shared_draft, whole
from mlx_t5.training.draft_folder import save_draft

SOURCE, WRITTEN = mx.array([[5, 9, 3, 1]]), mx.array([[0, 7, 8]])
IDS = np.array([1, 4, 7, 8, 20, 41, 60])
IN_BITS = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}


def a_draft(folder, shares):
    target, _ = load(folder)
    draft = shared_draft(target, 1)
    return target, draft if shares else whole(draft)


@pytest.fixture(params=["t5", "flan", "quantized", "mxfp8"])
def folder(request, reference_of, tmp_path):
    """Returns a target's folder: tied, with a separate head, or quantized."""
    kind = request.param
    if kind == "quantized":
        return convert(reference_of("flan").folder, tmp_path / kind, "float32", **IN_BITS)
    if kind == "mxfp8":  # other layers are in mxfp8, the embedding is affine
        more = IN_BITS | {"q_mode": "mxfp8"}
        return convert(reference_of("t5").folder, tmp_path / kind, "float32", **more)
    return reference_of(kind).folder


@pytest.mark.parametrize("shares", [True, False])
def test_a_narrowed_draft_keeps_the_logits_of_its_tokens(folder, shares, tmp_path):
    target, draft = a_draft(folder, shares)
    expected = draft(SOURCE, WRITTEN)[..., mx.array(IDS)]
    narrow(draft, IDS)
    head, names = draft.lm_head, {name for name, _ in tree_flatten(draft.parameters())}
    assert len(head.weight) == len(IDS) and draft.config.draft_vocab_size == len(IDS)
    assert ("lm_head.weight" in names) != shares and "d2t" in names
    path = save_draft(draft, folder, tmp_path / "draft")
    config = json.loads((path / "config.json").read_text())
    assert config["draft_vocab_size"] == len(IDS)
    stored = mx.load(str(path / "model.safetensors"))
    assert stored["d2t"].dtype == mx.int32 and stored["d2t"].tolist() == IDS.tolist()
    assert ("lm_head.weight" in stored) != shares
    loaded, _ = load(path, shared_with=target)
    for model in (draft, loaded):
        np.testing.assert_allclose(model(SOURCE, WRITTEN), expected, atol=1e-4, rtol=1e-4)
    if shares:
        alone = save_draft(draft, folder, tmp_path / "alone", standalone=True)
        assert mx.array_equal(load(alone)[0](SOURCE, WRITTEN), loaded(SOURCE, WRITTEN))
        wide = with_all_tokens(loaded)
        assert wide.config.draft_vocab_size is None and "d2t" not in wide
        np.testing.assert_allclose(
            wide(SOURCE, WRITTEN)[..., mx.array(IDS)], expected, atol=1e-4, rtol=1e-4
        )


@pytest.fixture(scope="module")
def paths(reference_of, tmp_path_factory):
    """Returns a target, and the root of two drafts' folders: "True" shares with it."""
    root, folder = tmp_path_factory.mktemp("drafts"), reference_of("flan").folder
    for shares in (True, False):
        target, draft = a_draft(folder, shares)
        narrow(draft, IDS)
        save_draft(draft, folder, root / str(shares))
    return target, root


def changed(folder, size=None, **arrays):
    """Changes a draft's folder: its size in config.json, or arrays; None removes an array."""
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = len(IDS) if size is None else size
    (folder / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(folder / "model.safetensors")) | arrays
    tensors = {name: array for name, array in tensors.items() if array is not None}
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})


NOT_ASCENDING = "the draft's table d2t is not of ascending token ids from 0 to "
BAD = {
    "descending": ({"d2t": mx.array([4, 1, 7, 8, 20, 41, 60])}, NOT_ASCENDING),
    "below": ({"d2t": mx.array([-1, 4, 7, 8, 20, 41, 60])}, NOT_ASCENDING),
    "huge": ({"d2t": mx.array(np.append(IDS[:6], 2**63).astype(np.uint64))}, NOT_ASCENDING),
    "shorter": ({"d2t": mx.array(IDS[:6])}, r"d2t has shape \(6,\) instead of \(7,\)"),
    "none": ({"d2t": None}, "missing d2t"),
    "longer than the vocabulary": ({"size": 10**6}, "draft_vocab_size is out of range"),
}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_table_is_refused(paths, tmp_path, bad, shares):
    target, root = paths
    folder = shutil.copytree(root / str(shares), tmp_path / "draft")
    change, message = BAD[bad]
    changed(folder, **change)
    with pytest.raises(UserError, match=message) as raised:
        load(folder, shared_with=target)
    assert "\n" not in str(raised.value)


def test_a_head_that_does_not_fit_its_table_is_refused(paths, tmp_path):
    target, root = paths
    folder = shutil.copytree(root / "False", tmp_path / "draft")
    changed(folder, **{"lm_head.weight": mx.zeros((9, 32))})
    with pytest.raises(UserError, match=r"lm_head.weight has shape \(9, 32\) instead of \(7, "):
        load(folder)
    changed(folder, **{"lm_head.weight": None})
    with pytest.raises(UserError, match="missing lm_head.weight"):
        load(folder)
    config = json.loads((root / "True" / "config.json").read_text())
    del config["draft_vocab_size"]
    folder = shutil.copytree(root / "True", tmp_path / "shared")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="unexpected d2t"):
        load(folder, shared_with=target)


def test_a_narrowed_draft_cannot_be_a_target(paths):
    _, root = paths
    draft, _ = load(root / "False")
    with pytest.raises(UserError, match=f"this model writes {len(IDS)} of .* it is a draft"):
        SpeculativeDecoder(draft)
