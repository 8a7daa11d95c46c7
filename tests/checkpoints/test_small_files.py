"""small_files.py: pipes, devices and endless files in a stranger's folder are refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import checkpoints
from checkpoints import TINY, siblings
from convert import convert, main
from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.checkpoints.small_files import (
    JSON_BYTES,
    SMALL_FILES,
    TOKENIZER_FILES,
    read_small,
    require_small,
    snapshot_id,
)
from mlx_t5.cli.models import locate
from mlx_t5.errors import UserError
from mlx_t5.text.tokenizer import load_tokenizer
from model import load


@pytest.fixture(autouse=True)
def ends():
    """Without the check these tests would wait for ever."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, kind: str) -> None:
    """Something at `path` that is no small file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a terabyte that takes no room


REFUSED = "is no regular file|has 1099.* GB, and none|is a link out of its folder"
KINDS = pytest.mark.parametrize("kind", ("pipe", "device", "folder", "huge"))


def test_a_small_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="and none has more than"):
        read_small(tmp_path / "a", 4)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "b")
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        require_small(tmp_path / "b")


@KINDS
@pytest.mark.parametrize("name", SMALL_FILES)
def test_what_is_no_small_file_is_refused(tiny, tmp_path, name, kind):
    put(tiny / name, kind)
    with pytest.raises(UserError, match=f"{name} ({REFUSED})"):
        convert(tiny, tmp_path / "out")
    assert siblings(tmp_path / "out") == {"source"}
    if name == "config.json":
        with pytest.raises(UserError, match=f"{name} ({REFUSED})"):
            load(tiny)
    if name in TOKENIZER_FILES:
        beside = "tokenizer_config.json" if name != "tokenizer_config.json" else "tokenizer.json"
        (tiny / beside).write_text("{}")
        with pytest.raises(UserError, match=name):
            load_tokenizer(tiny)


@KINDS
def test_an_index_and_a_shard(tmp_path, kind):
    folder = checkpoints.save(checkpoints.random_state(TINY), tmp_path / "in", shards=2)
    put(folder / "model-00002-of-00002.safetensors", kind)
    with pytest.raises(UserError, match="header|are not there: model-00002"):
        open_checkpoint(folder)
    put(folder / "model.safetensors.index.json", kind)
    with pytest.raises(UserError, match="no model.safetensors or|has 1099.* GB, and none"):
        open_checkpoint(folder)


def test_the_limits_leave_room_for_real_files(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * JSON_BYTES)
    assert len(read_small(tmp_path / "config.json")) == JSON_BYTES
    (tmp_path / "tokenizer.json").write_bytes(b" " * 35_000_000)
    require_small(tmp_path / "tokenizer.json")


@KINDS
def test_chat_templates(tiny, kind):
    """T5 has no chats, but transformers reads what it finds."""
    source = Path(checkpoints.__file__).resolve().parents[2] / "demo" / "target"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / name).write_bytes((source / name).read_bytes())
    put(tiny / "chat_template.jinja", kind)
    with pytest.raises(UserError, match="chat_template.jinja"):
        load_tokenizer(tiny)


def test_a_path_that_leads_nowhere_is_one_line(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("~nosuchuser/t5", str(tmp_path / "loop")):
        for argv in (["--model", name], ["--model", "demo/target", "--mlx-path", name]):
            assert main(argv) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {name} leads nowhere") and error.count("\n") == 1
        with pytest.raises(UserError, match="leads nowhere"):
            locate(name, convert)


def test_a_snapshot_knows_its_repository():
    cache = Path("/home/me/hub")
    assert snapshot_id(cache / "models--google--flan-t5-xl/snapshots/abc") == "google/flan-t5-xl"
    assert snapshot_id(cache / "models--t5-small/snapshots/abc") == "t5-small"
    for other in ("snapshots/abc", "models--a--b/refs/main", "datasets--a--b/snapshots/abc", "t5"):
        assert snapshot_id(cache / other) is None
