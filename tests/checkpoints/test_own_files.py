"""What is read or copied from a folder is its own, and no pipe; the Hub's cache works."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import adapters
import checkpoints
from checkpoints import TINY, siblings
from convert import convert
from mlx_t5.checkpoints.generation_config import read_generation_config, read_tasks
from mlx_t5.checkpoints.small_files import SMALL_FILES, require_own
from mlx_t5.errors import UserError
from model import load
from tokenizer_folders import old_json, train, write

OF_CHATS = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/a.jinja")
MODULES = {
    "1_Pooling": {"pooling_mode": "mean", "embedding_dimension": 64},
    "2_Dense": {"in_features": 64, "out_features": 8, "bias": False},
    "3_Normalize": {},
}
ALL = [
    *SMALL_FILES,
    *OF_CHATS,
    *(f"{module}/config.json" for module in MODULES),
    "2_Dense/weights",
    "1 of the model",
    "2 of the model",
    "index of the model",
]
FOLDERS = [*MODULES, "additional_chat_templates"]


@pytest.fixture(scope="module", params=["safetensors", "zip"])
def whole(request, tmp_path_factory):
    """A folder with a file of every kind, and an adapter; and which file is of which kind."""
    root = tmp_path_factory.mktemp(request.param)
    folder, safe = root / "model", request.param == "safetensors"
    train(folder, "t5")
    write(folder, old_json(folder, 100))
    checkpoints.save(checkpoints.random_state(TINY), folder, request.param, 2, config=TINY)
    kinds = [("Transformer", ""), *((name[2:], name) for name in MODULES)]
    listed = [{"type": f"sentence_transformers.models.{k}", "path": path} for k, path in kinds]
    files = dict.fromkeys([*SMALL_FILES, "chat_template.json"], {}) | {"modules.json": listed}
    files |= {f"{module}/config.json": settings for module, settings in MODULES.items()}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if not (folder / name).exists():
            (folder / name).write_text(json.dumps(content))
    (folder / "additional_chat_templates").mkdir()
    for name in OF_CHATS[0], OF_CHATS[2]:
        (folder / name).write_text("{{ messages }}")
    dense = {"linear.weight": torch.ones(8, 64)}
    main = "model.safetensors" if safe else "pytorch_model.bin"
    (save_file if safe else torch.save)(dense, folder / "2_Dense" / main)
    adapters.by_hand(root / "adapter", {"encoder.block.0.layer.0.SelfAttention.q": (64, 64)},
                     target_modules=["encoder.block.0.layer.0.SelfAttention.q"])  # fmt: skip
    stem, suffix = main.split(".")
    shards = {f"{i} of the model": f"{stem}-{i:05}-of-00002.{suffix}" for i in (1, 2)}
    places = {"index of the model": f"{main}.index.json", "2_Dense/weights": f"2_Dense/{main}"}
    names = {kind: {**shards, **places}.get(kind, kind) for kind in ALL}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == set(names.values()), "no file is left out"
    return folder, root / "adapter", names


def read(folder, adapter, out):
    """All that reads a folder where it is."""
    load(folder, adapter=adapter)
    return read_generation_config(folder), read_tasks(folder)


def copy(folder, adapter, out):
    return convert(folder, out, adapter_path=adapter)


@pytest.fixture(autouse=True)
def ends():
    """Without the check some of these tests would wait for ever."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def led_out(folder: Path, name: str, outside: Path) -> Path:
    """A copy of the folder, in which a link stands for a file or folder that lies elsewhere."""
    there = shutil.copytree(folder, outside.parent / "stranger") / name
    shutil.move(there, outside)
    there.symlink_to(outside)
    return outside.parent / "stranger"


def put(path: Path, thing: str) -> None:
    """Something at `path` that is no small file."""
    path.unlink()
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a terabyte that takes no room


@pytest.mark.parametrize("use", [read, copy])
@pytest.mark.parametrize("kind", ALL + FOLDERS)
def test_a_link_out_of_the_folder(whole, tmp_path, kind, use):
    folder, adapter, names = whole
    stranger = led_out(folder, names.get(kind, kind), tmp_path / "private")
    if use is copy and kind in (*OF_CHATS, "additional_chat_templates"):
        use(stranger, adapter, tmp_path / "out")
        assert not list((tmp_path / "out").glob("*template*"))
        return
    with pytest.raises(UserError, match=r"is a link out of its folder; put a copy of the file"):
        use(stranger, adapter, tmp_path / "out")
    assert siblings(tmp_path / "out") == {"stranger", "private"}


@pytest.mark.parametrize("thing", ["pipe", "folder", "huge"])
@pytest.mark.parametrize(
    ("use", "kind"),
    [(read, OF_CHATS[0])] + [(use, k) for use in (read, copy) for k in ALL if k not in OF_CHATS],
)
def test_what_is_no_small_file(whole, tmp_path, use, kind, thing):
    folder, adapter, names = whole
    stranger = shutil.copytree(folder, tmp_path / "stranger")
    put(stranger / names[kind], thing)
    refused = "is no regular file|has 1099.* GB, and none|is a link out of its folder"
    if kind.endswith(("of the model", "weights")):
        refused += "|that are not there|: no model.safetensors or|header|not a whole torch"
    with pytest.raises(UserError, match=refused):
        use(stranger, adapter, tmp_path / "out")
    assert siblings(tmp_path / "out") == {"stranger"}


@pytest.mark.parametrize("use", [read, copy])
@pytest.mark.parametrize("kind", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_out_of_an_adapter(whole, tmp_path, kind, use):
    folder, adapter, _ = whole
    stranger = led_out(adapter, kind, tmp_path / "private")
    with pytest.raises(UserError, match=f"{kind} is a link out of its folder"):
        use(folder, stranger, tmp_path / "out")


def linked(folder: Path, target: Path, place) -> Path:
    """`folder` again, with links only; `place` makes a file's name into where the file is put."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        real, link = place(str(name).replace("/", "-")), target / name
        for each in (real, link):
            each.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, real)
        link.symlink_to(os.path.relpath(real, link.parent))
    return target


def test_links_within_the_folder_and_a_linked_folder(whole, tmp_path):
    folder, adapter, _ = whole
    inside = linked(folder, tmp_path / "model", lambda name: tmp_path / "model" / "real" / name)
    (tmp_path / "link").symlink_to(inside)
    expect_the_same(folder, tmp_path / "link", adapter, tmp_path)


@pytest.mark.parametrize("shared", [False, True], ids=["blobs", "shared blobs"])
def test_the_cache_of_the_hub(whole, tmp_path, shared):
    """Its snapshots are links; huggingface_hub 2 has the blobs of all repositories in one place."""
    folder, adapter, _ = whole
    repository = tmp_path / "hub" / "models--a--t5"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    linked(folder, snapshot, lambda name: blobs / name)
    if shared:
        linked(blobs, repository / "new", lambda name: repository.parent / "blobs" / "0f" / name)
        shutil.rmtree(blobs)
        (repository / "new").rename(blobs)
    expect_the_same(folder, snapshot, adapter, tmp_path)


def expect_the_same(folder, links, adapter, tmp_path):
    assert read(links, adapter, None) == read(folder, adapter, None)
    copies = [copy(f, adapter, tmp_path / name) for f, name in ((folder, "out"), (links, "again"))]
    first, second = (
        {f.relative_to(out): f.read_bytes() for f in out.rglob("*") if f.is_file()}
        for out in copies
    )
    assert all(not file.is_symlink() for file in copies[1].rglob("*"))
    assert first.keys() == second.keys() and len(first) > len(SMALL_FILES)
    assert {f for f in first if first[f] != second[f]} <= {Path("config.json")}  # has the origin


def test_links_into_the_blobs_of_the_same_repository_only(tmp_path):
    for name in ("models--a--t5", "models--b--t5", "other"):
        (tmp_path / name / "snapshots" / "1").mkdir(parents=True)
        (tmp_path / name / "blobs").mkdir()
        (tmp_path / name / "blobs" / "2").touch()
    for name, target in (("models--a--t5", "models--b--t5"), ("other", "other")):
        file = tmp_path / name / "snapshots" / "1" / "config.json"
        file.symlink_to(tmp_path / target / "blobs" / "2")
        with pytest.raises(UserError, match="link out of its folder"):
            require_own(file)
