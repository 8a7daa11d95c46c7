"""Copies of a model have the same identity; any change gives a different identity."""

import shutil

import pytest

import adapters
from mlx_t5 import names
from mlx_t5.backend import mx
from mlx_t5.checkpoints.identity import adapter_identity, identity
from mlx_t5.errors import UserError
from sentence_folders import add_modules, change, pooling

BUNDLED = names.BUNDLED / "target"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(BUNDLED, tmp_path / "model")


def rewrite(folder, change):
    (weights,) = folder.glob("*.safetensors")
    arrays = mx.load(str(weights))
    name = max(arrays, key=lambda n: arrays[n].size)
    arrays[name] = change(arrays[name])
    mx.eval(arrays)
    mx.save_safetensors(str(weights), arrays, {"format": "mlx"})


def test_copies_of_a_model_have_one_identity_wherever_they_come_from(folder):
    change(folder / "config.json", {"converted_from": {"model": "x"}})
    (folder / "README.md").write_text("another")
    assert identity(folder) == identity(BUNDLED)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: mx.concatenate([weight[:-1], 2 * weight[-1:]]),  # in the last row
        lambda weight: weight.astype(mx.float16),
        lambda weight: weight + 1e-3,
    ],
)
def test_other_weights_have_a_different_identity(folder, change):
    rewrite(folder, change)
    assert identity(folder) != identity(BUNDLED)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_other_small_files_have_a_different_identity(folder, file):
    before = identity(folder)
    change(folder / file, {"pad_token_id": 7})
    assert identity(folder) != before


def test_the_identity_covers_the_modules_of_a_sentence_encoder(folder):
    add_modules(folder, pooling("mean"))
    before = identity(folder)
    change(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    assert identity(folder) != before


def test_different_adapters_have_different_identities(tmp_path):
    layer = "encoder.block.0.layer.0.SelfAttention.q"
    for name, rank in (("a", 1), ("b", 2)):
        adapters.by_hand(tmp_path / name, {layer: (128, 64)}, rank=rank, target_modules=["q"])
    assert adapter_identity(tmp_path / "a") != adapter_identity(tmp_path / "b")


def test_an_unreadable_folder_is_reported(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        identity(tmp_path)
