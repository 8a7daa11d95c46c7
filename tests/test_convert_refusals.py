"""convert.py refuses bad input in one line and never leaves a half-written folder."""

from __future__ import annotations

import json

import pytest
import torch

import checkpoints
from checkpoints import TINY, arrays, siblings
from convert import convert, main
from mlx_t5.backend import mx
from mlx_t5.errors import UserError


def test_an_unreadable_tensor_is_refused(tiny, tmp_path):
    state = checkpoints.random_state(TINY) | {"shared.weight": torch.ones(40, 64).to(torch.int8)}
    checkpoints.save(state, tiny, config=TINY)
    with pytest.raises(UserError, match="shared.weight is int8; weights must be float32"):
        convert(tiny, tmp_path / "deep" / "out")
    assert siblings(tmp_path / "out") == {"source"}


def test_an_mlx_folder_is_no_source(tiny, tmp_path):
    out = convert(tiny, tmp_path / "out")
    with pytest.raises(UserError, match="MLX folder already"):
        convert(out, tmp_path / "again")


def test_files_that_macos_leaves_in_folders_are_ignored(tiny, tmp_path):
    for folder in (tiny, convert(tiny, tmp_path / "out")):
        for name in (".DS_Store", "._config.json", "._model.safetensors"):
            (folder / name).write_bytes(b"\0\5\x16\7")
    assert siblings(convert(tiny, tmp_path / "out", overwrite=True) / "x") == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    }
    (tiny / "model.safetensors").unlink()
    message = "no model.safetensors or .*; it holds config.json, generation_config.json, tf_model"
    with pytest.raises(UserError, match=message):
        convert(tiny, tmp_path / "again")


def test_the_command_line_converts_into_the_default_folder(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "source", "-q", "--q-bits", "8"]) == 0
    out = tmp_path / "models" / "source"  # the default folder
    assert capsys.readouterr().out == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 8
    before = (out / "model.safetensors").read_bytes()
    assert main(["--model", "source/"]) == 2
    assert (out / "model.safetensors").read_bytes() == before
    assert capsys.readouterr() == (
        "",
        f"error: {out} exists; replace it with --overwrite or choose another folder\n",
    )
    assert main(["--model", "source", "--overwrite", "--dtype", "float32"]) == 0
    assert arrays(out)["shared.weight"].dtype == mx.float32
    assert siblings(out) == {"source"}
