"""Tests small_files.py: the largest size of a file, and where a path leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import convert, main
from mlx_t5.checkpoints.small_files import JSON_BYTES, read_small, require_small, snapshot_id
from mlx_t5.errors import UserError
from mlx_t5.names import locate


def test_a_small_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="and no such file has more than"):
        read_small(tmp_path / "a", 4)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "b")
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        require_small(tmp_path / "b")


def test_the_limits_leave_room_for_real_files(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * JSON_BYTES)
    assert len(read_small(tmp_path / "config.json")) == JSON_BYTES
    (tmp_path / "tokenizer.json").write_bytes(b" " * 35_000_000)
    require_small(tmp_path / "tokenizer.json")


def test_a_path_that_leads_nowhere_is_reported_in_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    too_long = str(tmp_path / ("a" * 300))  # as a name that is not UTF-8 on a Mac
    for name in ("~nosuchuser/t5", str(tmp_path / "loop"), too_long):
        for argv in (["--model", name], ["--model", "demo/target", "--mlx-path", name]):
            assert main(argv) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {name} leads nowhere") and error.count("\n") == 1
        with pytest.raises(UserError, match="leads nowhere"):
            locate(name, convert)


def test_a_snapshot_path_names_its_repository():
    cache = Path("/home/me/hub")
    assert snapshot_id(cache / "models--google--flan-t5-xl/snapshots/abc") == "google/flan-t5-xl"
    assert snapshot_id(cache / "models--t5-small/snapshots/abc") == "t5-small"
    for other in ("snapshots/abc", "models--a--b/refs/main", "datasets--a--b/snapshots/abc", "t5"):
        assert snapshot_id(cache / other) is None
