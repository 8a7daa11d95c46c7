"""output_folder.py: a folder appears whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from backend import UserError
from checkpoints import siblings
from output_folder import check_output, new_folder, require_space


def test_an_error_leaves_nothing(tmp_path):
    out = tmp_path / "models" / "out"
    with pytest.raises(RuntimeError), new_folder(out, overwrite=False) as partial:
        (partial / "config.json").touch()
        assert not out.exists()
        raise RuntimeError
    assert list(out.parent.iterdir()) == []


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="made in the meantime"), new_folder(out, overwrite=False):
        out.mkdir()
        (out / "theirs").touch()
    assert siblings(out) == {"out"} and (out / "theirs").exists()


def test_check_output(tmp_path):
    check_output(tmp_path / "none", overwrite=False, ours=lambda name: False)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(UserError):
        check_output(tmp_path / "dangling", overwrite=True, ours=lambda name: True)


def test_leftovers_of_killed_runs_are_cleared(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getppid()):
        (tmp_path / f".out.partial-{pid}").mkdir()
    (tmp_path / f".other.partial-{ended.pid}").mkdir()
    with new_folder(tmp_path / "out", overwrite=False) as partial:
        (partial / "config.json").touch()
    running = f".out.partial-{os.getppid()}"
    assert siblings(tmp_path / "out") == {"out", running, f".other.partial-{ended.pid}"}


def test_require_space(tmp_path):
    require_space(tmp_path / "a" / "b", 1)
    with pytest.raises(UserError, match="make room"):
        require_space(tmp_path / "a" / "b", 1 << 60)


def test_what_a_killed_run_had_set_aside_is_put_back(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    aside = tmp_path / f".out.old-{ended.pid}"
    aside.mkdir()
    (aside / "config.json").write_text("old")
    with (
        pytest.raises(UserError, match="exists, put back"),
        new_folder(tmp_path / "out", overwrite=False),
    ):
        pass
    assert siblings(tmp_path / "out") == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    with new_folder(tmp_path / "out", overwrite=True) as partial:
        (partial / "config.json").write_text("new")
    assert (tmp_path / "out" / "config.json").read_text() == "new"
