"""Only a folder's own regular files are read or copied; folders in the Hub's cache work."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import adapters
import checkpoints
from checkpoints import TINY
from convert import convert
from mlx_t5.checkpoints.generation_config import read_generation_config, read_tasks
from mlx_t5.checkpoints.small_files import SMALL_FILES, require_own
from mlx_t5.errors import UserError
from model import load
from sentence_folders import NORMALIZE, add_modules, dense, pooling
from tokenizer_folders import old_json, train, write

CHATS = "additional_chat_templates"
OF_CHATS = ("chat_template.jinja", "chat_template.json", f"{CHATS}/a.jinja")
ALL = [
    *SMALL_FILES,
    *OF_CHATS,
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/pytorch_model.bin",
    "3_Normalize/config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]
FOLDERS = ["1_Pooling", "2_Dense", "3_Normalize", CHATS]
Q = "encoder.block.0.layer.0.SelfAttention.q"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a model folder with a file of every kind, and an adapter folder."""
    root = tmp_path_factory.mktemp("whole")
    folder = root / "model"
    train(folder, "t5")
    write(folder, old_json(folder, 100))
    checkpoints.save(checkpoints.random_state(TINY), folder, shards=2, config=TINY)
    add_modules(folder, pooling("mean"), dense(64, 8, bias=False), NORMALIZE)
    (folder / CHATS).mkdir()
    for name in ALL:
        if not (folder / name).exists():
            (folder / name).write_text("{}")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == set(ALL), "no file is left out"
    adapters.by_hand(root / "adapter", {Q: (64, 64)}, target_modules=[Q])
    return folder, root / "adapter"


def read(folder, adapter, out):
    """Calls every function that reads a folder in place."""
    load(folder, adapter=adapter)
    return read_generation_config(folder), read_tasks(folder)


def copy(folder, adapter, out):
    return convert(folder, out, adapter_path=adapter)


@pytest.fixture(autouse=True)
def ends():
    """Ends a test that hangs, as some would without the check of files."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, thing: str, outside: Path) -> None:
    """Replaces the file at `path` by a link to it, or by a thing that is no small file."""
    if thing == "link":
        shutil.move(path, outside)
        path.symlink_to(outside)
        return
    path.unlink()
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a sparse file of a terabyte


THINGS = {
    "link": "is a link out of its folder; put a copy of the file",
    "pipe": "is no regular file|that are missing|: no model.safetensors or",
    "folder": "is no regular file|that are missing|: no model.safetensors or",
    "huge": "has 1099.* GB, and no such|header|not a whole torch",
}


@pytest.mark.parametrize("use", [read, copy])
@pytest.mark.parametrize(
    ("name", "thing"),
    [(name, "link") for name in [*FOLDERS, *ALL]]
    + [(name, "pipe") for name in ("tokenizer.json", "generation_config.json")]
    + [
        (name, thing) for name in ("config.json", *ALL[-5:]) for thing in ("pipe", "folder", "huge")
    ],
)
def test_links_pipes_and_huge_files_are_refused(whole, tmp_path, use, name, thing):
    stranger = shutil.copytree(whole[0], tmp_path / "stranger")
    put(stranger / name, thing, tmp_path / "private")
    if use is copy and name in (CHATS, *OF_CHATS):
        use(stranger, whole[1], tmp_path / "out")
        assert not list((tmp_path / "out").glob("*template*"))
        return
    with pytest.raises(UserError, match=THINGS[thing]):
        use(stranger, whole[1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("use", [read, copy])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_out_of_an_adapter_is_refused(whole, tmp_path, name, use):
    stranger = shutil.copytree(whole[1], tmp_path / "stranger")
    put(stranger / name, "link", tmp_path / "private")
    with pytest.raises(UserError, match=f"{name} is a link out of its folder"):
        use(whole[0], stranger, tmp_path / "out")


def linked(folder: Path, target: Path, place) -> Path:
    """Copies `folder` to `target` as links to files, which `place(name)` says where to put."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        real, link = place(str(name).replace("/", "-")), target / name
        for path in (real, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, real)
        link.symlink_to(os.path.relpath(real, link.parent))
    return target


def test_links_within_the_folder_and_a_linked_folder_are_followed(whole, tmp_path):
    folder, adapter = whole
    inside = linked(folder, tmp_path / "model", lambda name: tmp_path / "model" / "real" / name)
    (tmp_path / "link").symlink_to(inside)
    expect_the_same(folder, tmp_path / "link", adapter, tmp_path)


@pytest.mark.parametrize("shared", [False, True], ids=["blobs", "shared blobs"])
def test_folders_in_the_hub_cache_are_read(whole, tmp_path, shared):
    """Snapshots are links; huggingface_hub 2 keeps the blobs of all repositories in one folder."""
    folder, adapter = whole
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


def test_only_links_into_blobs_of_the_same_repository_are_followed(tmp_path):
    for name in ("models--a--t5", "models--b--t5", "other"):
        (tmp_path / name / "snapshots" / "1").mkdir(parents=True)
        (tmp_path / name / "blobs").mkdir()
        (tmp_path / name / "blobs" / "2").touch()
    for name, target in (("models--a--t5", "models--b--t5"), ("other", "other")):
        file = tmp_path / name / "snapshots" / "1" / "config.json"
        file.symlink_to(tmp_path / target / "blobs" / "2")
        with pytest.raises(UserError, match="link out of its folder"):
            require_own(file)
