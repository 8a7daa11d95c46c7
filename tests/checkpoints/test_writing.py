"""Tests writing.py: a folder appears complete or not at all; nobody else's file is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import siblings
from command_line import ROOT
from mlx_t5.backend import mx
from mlx_t5.checkpoints import writing
from mlx_t5.checkpoints.writing import (
    check_output_folder,
    new_folder,
    new_model_folder,
    require_own,
    save_weights,
)
from mlx_t5.errors import UserError


def folder_with(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(content)
    return path


def content(path: Path) -> str:
    return (path / "config.json").read_text()


def test_a_folder_appears_complete_and_replaces_an_older_one(tmp_path):
    out = tmp_path / "models" / "out"
    for text in ("first", "second"):
        with new_folder(out, overwrite=text == "second") as partial:
            assert partial == out.with_name("out.partial") and not list(partial.iterdir())
            assert not out.exists() or content(out) == "first"
            (partial / "config.json").write_text(text)
        assert content(out) == text and siblings(out) == {"out"}


def test_an_error_leaves_the_older_folder(tmp_path):
    out = folder_with(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt), new_folder(out, overwrite=True):
        raise KeyboardInterrupt
    assert content(out) == "old" and siblings(out) == {"out"}


KILLED = (
    "import os, sys\nfrom pathlib import Path\nfrom mlx_t5.checkpoints import writing\n"
    "def killed(*_): os._exit(9)\n"
    "if sys.argv[2]: setattr(*((os, 'replace') if sys.argv[2] == 'replace' else"
    " (writing.shutil, 'rmtree')), killed)\n"
    "with writing.new_folder(Path(sys.argv[1]), True) as partial:\n"
    "    (partial / 'config.json').write_text('new')\n"
    "    sys.argv[2] or killed()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "left"),
    (("", {"out", "out.partial"}), ("replace", {"out.partial", "out.old"})),
)
def test_a_killed_run_loses_nothing(tmp_path, moment, left):
    """A killed process leaves folders that the next run removes, or names."""
    out = folder_with(tmp_path / "out", "old")
    command = [sys.executable, "-c", KILLED, str(out), moment]
    assert subprocess.run(command, cwd=ROOT).returncode == 9
    assert siblings(out) == left
    if moment == "replace":
        with pytest.raises(UserError, match=r"out\.old is the earlier out: .* rename it back"):
            check_output_folder(out, overwrite=True)
        out.with_name("out.old").rename(out)
    assert content(out) == "old"
    check_output_folder(out, overwrite=True)
    with new_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text("next")
    assert content(out) == "next" and siblings(out) == {"out"}


def test_what_a_run_left_after_replacing_is_removed_by_the_next(tmp_path):
    out = folder_with(tmp_path / "out", "old")
    folder_with(tmp_path / "out.old", "older")
    with new_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text("new")
    assert content(out) == "new" and siblings(out) == {"out"}


def test_two_runs_do_not_share_a_folder(tmp_path):
    out = tmp_path / "out"
    with (
        new_folder(out, overwrite=False) as partial,
        pytest.raises(UserError, match="another run writes to"),
    ):
        (partial / "config.json").write_text("one")
        with new_folder(out, overwrite=False):
            pass
    assert content(out) == "one" and siblings(out) == {"out"}


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="made in the meantime"), new_folder(out, overwrite=False):
        folder_with(out, "somebody else's")
    assert content(out) == "somebody else's"


def test_only_folders_of_models_are_replaced(tmp_path):
    out = folder_with(tmp_path / "out", "{}")
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").touch()
    check_output_folder(out, overwrite=True)
    for name in ("thesis.tex", "1_Pooling/thesis.tex", "photos/", "1_Pooling/1_Pooling/"):
        path = out / name
        path.mkdir() if name.endswith("/") else path.touch()
        with pytest.raises(UserError, match=f"more than a model .{name.rstrip('/')}"):
            check_output_folder(out, overwrite=True)
        path.rmdir() if name.endswith("/") else path.unlink()
    (out / "2_Dense").touch()  # not the folder of a module
    with pytest.raises(UserError, match="more than a model .2_Dense"):
        check_output_folder(out, overwrite=True)
    with pytest.raises(UserError, match="config.json is a file"):
        check_output_folder(out / "config.json", overwrite=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(UserError):
        check_output_folder(tmp_path / "dangling", overwrite=True)


def test_the_source_is_never_replaced(tmp_path, respelled):
    source = folder_with(tmp_path / "source", "{}")
    (source / "1_Pooling").mkdir()
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / "1_Pooling", tmp_path, respelled(source)):
        with pytest.raises(UserError, match="is the source, contains it or is part of it"):
            check_output_folder(out, overwrite=True, source=source)
    check_output_folder(source / "new", overwrite=True, source=source)


def test_a_link_out_of_the_source_is_not_copied(tmp_path):
    """The copy of a private file might be uploaded."""
    source = folder_with(tmp_path / "source", "{}")
    (tmp_path / "private").write_text("key")
    (source / "tokenizer.json").symlink_to(tmp_path / "private")
    with (
        pytest.raises(UserError, match="tokenizer.json is a link out of its folder"),
        new_model_folder(tmp_path / "out", False, source),
    ):
        pass
    assert siblings(source) == {"source", "private"}


@pytest.mark.parametrize("blobs", ("models--a--t5/blobs", "blobs"))
def test_the_links_of_the_hub_cache_are_copied(tmp_path, blobs):
    snapshot = tmp_path / "models--a--t5" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    (tmp_path / blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to(os.path.relpath(tmp_path / blobs / "1", snapshot))
    with new_model_folder(tmp_path / "out", False, snapshot):
        pass
    assert content(tmp_path / "out") == "{}"
    (snapshot / "merges.txt").symlink_to("/etc/hostname")
    with pytest.raises(UserError):
        require_own(snapshot / "merges.txt", snapshot)


@pytest.mark.parametrize("shard_bytes", (100, 300, 10_000))
def test_shards_and_their_index_hold_every_tensor(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(writing, "SHARD_BYTES", shard_bytes)
    tensors = {name: mx.full((8, i), i) for i, name in enumerate("dcbae", 1)}
    save_weights(tmp_path, iter(tensors.items()), "mlx")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    count = len(files)
    whole = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert files == (["model.safetensors"] if shard_bytes == 10_000 else whole)
    assert list(index["weight_map"]) == sorted(tensors)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    for file in files:
        arrays, metadata = mx.load(str(tmp_path / file), return_metadata=True)
        assert metadata == {"format": "mlx"}
        assert {name for name, where in index["weight_map"].items() if where == file} == set(arrays)
        assert sum(array.nbytes for array in arrays.values()) <= shard_bytes or len(arrays) == 1
        assert all(mx.array_equal(array, tensors[name]) for name, array in arrays.items())
