"""Tests hub.py: which files are requested from the Hub, and the messages of failures."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fake_hub import FakeHub, serve
from mlx_t5.checkpoints.hub import (
    choose_files,
    origin,
    snapshot_id,
    source_folder,
)
from mlx_t5.errors import UserError

NOWHERE = "http://127.0.0.1:9"  # nothing listens there
SMALL = {name: name.encode() for name in ("config.json", "spiece.model", "tokenizer_config.json")}
STRANGERS = dict.fromkeys(
    "tf_model.h5 flax_model.msgpack rust_model.ot README.md onnx/model.onnx onnx/config.json "
    "sub/model.safetensors evil.py model.fp16.safetensors".split(),
    b"never",
)


@pytest.fixture
def hub():
    with serve(FakeHub()) as running:
        yield running


@pytest.fixture
def ask(hub, tmp_path):
    """Returns a function that resolves `id` or `id@revision` to a folder or to `error: …`."""

    def run(*models: str, **settings: str) -> list[str]:
        code = (
            "import sys\n"
            "from mlx_t5.checkpoints.hub import source_folder\n"
            "from mlx_t5.errors import UserError\n"
            "for model in sys.argv[1:]:\n"
            "    try: print(source_folder(*model.split('@')))\n"
            "    except UserError as error: print(f'error: {error}')"
        )
        run = hub.python(tmp_path, "-c", code, *models, **settings)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    return run


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.slow
def test_only_the_needed_files_are_fetched(hub, ask):
    sets = {"model.safetensors": b"1", "pytorch_model.bin": b"2", INDEX: b"{}"}
    sets |= dict.fromkeys(SHARDS, b"3")
    hub.repos["google-t5/t5-small"] = SMALL | STRANGERS | sets
    hub.renamed["t5-small"] = "google-t5/t5-small"  # the Hub redirects old ids
    # An index without its shards does not count; google/flan-ul2 has one on main.
    index = {"model.safetensors.index.json": b"{}", "model-00001-of-00002.safetensors": b""}
    shards = {f"pytorch_model-0000{i}-of-00002.bin": bytes(i) for i in (1, 2)}
    whole = {"pytorch_model.bin.index.json": b"{}", **shards}
    hub.repos["google/flan-ul2"] = SMALL | STRANGERS | index | whole
    hub.repos["google/flan-ul2@v1"] = SMALL | {"model.safetensors": b"old"}
    ids = ("t5-small", "google/flan-ul2", "google/flan-ul2@v1")
    folders = ask(*ids, HF_TOKEN="hf_secret")
    expected = {*SMALL, "model.safetensors"}, {*SMALL, *whole}, {*SMALL, "model.safetensors"}
    assert tuple(map(names, folders)) == expected and hub.fetched == set.union(*expected)
    assert (Path(folders[2]) / "model.safetensors").read_bytes() == b"old"
    assert not any(name in path for _, path in hub.requests for name in STRANGERS)
    assert "Bearer hf_secret" in hub.tokens
    # The files are cached now, so a lost connection or HF_HUB_OFFLINE makes no difference.
    assert ask(*ids, HF_HUB_OFFLINE="1") == ask(*ids, HF_ENDPOINT=NOWHERE) == folders


def test_failed_requests_are_reported_in_one_line(hub, ask):
    hub.repos = {"a/gated": SMALL, "a/t5": SMALL | STRANGERS, "a/bare": {"model.safetensors": b""}}
    hub.gated = {"a/gated"}
    lines = ask("no/where", "a/gated", "a/t5@v9", "a/t5", "a/bare")
    starts = (
        "no/where: no such folder, and no such model on the Hub; check the spelling",
        "a/gated: access is restricted; accept its terms on huggingface.co",
        "a/t5 at revision v9: there is no such revision",
        "a/t5: the repository has no whole model.safetensors or pytorch_model.bin",
        "a/bare: the repository has no config.json",
    )
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"error: {start}")
    assert not hub.fetched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cause"),
    (({"HF_ENDPOINT": NOWHERE}, "ConnectError"), ({"HF_HUB_OFFLINE": "1"}, "OfflineMode")),
)
def test_a_lost_connection_with_an_empty_cache_is_reported(ask, settings, cause):
    (line,) = ask("a/t5", **settings)
    assert line.startswith(f"error: a/t5: cannot be downloaded ({cause}")
    assert line.endswith("; connect, or give a local folder")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_folders_and_invalid_hub_ids_send_no_request(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "google" / "t5").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert source_folder("google/t5") == Path("google/t5")  # a folder is preferred to a Hub id
    for name in ("", "/no/such/folder", "a/b/c", "a b", "file"):
        with pytest.raises(UserError, match="neither a folder nor a Hub id"):
            source_folder(name)


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("listed", "chosen"),
    (
        ([], []),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", INDEX, *SHARDS], ["model.safetensors"]),
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], ["pytorch_model.bin"]),
        ([INDEX, *SHARDS, "pytorch_model.bin"], [INDEX, *SHARDS]),
        ([INDEX, *SHARDS[:2], "pytorch_model.bin"], ["pytorch_model.bin"]),
        ([INDEX, *SHARDS, "model-00001-of-00002.safetensors"], [INDEX, *SHARDS]),
        (SHARDS, []),
        ([INDEX], []),
        (["spiece.model", "config.json", "evil/config.json"], ["config.json", "spiece.model"]),
    ),
)
def test_choose_files_picks_one_complete_checkpoint(listed, chosen):
    assert choose_files(listed) == chosen


def test_the_origin_of_a_model_is_recorded(tmp_path):
    commit = tmp_path / "models--google-t5--t5-small" / "snapshots" / "abc"
    of_old = origin("t5-small", None, commit)
    assert of_old == {"model": "google-t5/t5-small", "commit": "abc"}
    assert origin("a/t5", "v1", commit) == {"model": "a/t5", "revision": "v1", "commit": "abc"}
    assert origin(str(tmp_path / "t5" / ".." / "t5"), None, tmp_path / "t5" / ".." / "t5") == {
        "folder": str(tmp_path / "t5")
    }


def test_a_snapshot_path_names_its_repository():
    cache = Path("/home/me/hub")
    assert snapshot_id(cache / "models--google--flan-t5-xl/snapshots/abc") == "google/flan-t5-xl"
    assert snapshot_id(cache / "models--t5-small/snapshots/abc") == "t5-small"
    for other in ("snapshots/abc", "models--a--b/refs/main", "datasets--a--b/snapshots/abc", "t5"):
        assert snapshot_id(cache / other) is None
