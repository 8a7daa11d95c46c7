"""Tests the names of models, and the models used when none is named."""

import json
from pathlib import Path

import pytest

from mlx_t5 import loading
from mlx_t5.backend import mx
from mlx_t5.checkpoints import checkpoint, hub
from mlx_t5.checkpoints.hub import locate
from mlx_t5.convert import convert
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.loading import choose_pair, default_draft


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Runs every test in a separate folder, beside a clone that has no converted models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HOME", tmp_path / "clone")


class Hub:
    """A fake Hub; records which ids were downloaded, and which are in the cache."""

    def __init__(self):
        self.downloaded: list[str] = []
        self.in_cache: set[str] = set()
        self.absent: set[str] = set()

    def download(self, name, revision=None):
        self.downloaded.append(name)
        if name in self.absent:
            raise UserError(f"{name}: cannot be downloaded")
        return self.snapshot(name)

    def cached(self, name, revision=None):
        return self.snapshot(name) if name in self.in_cache else None

    def snapshot(self, name):
        folder = Path("hub") / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        return folder


@pytest.fixture(autouse=True)
def fake_hub(monkeypatch):
    fake = Hub()
    monkeypatch.setattr(hub, "download", fake.download)
    monkeypatch.setattr(hub, "cached", fake.cached)
    return fake


def converted(name: str, source: str | dict | None = None, above: str = "models") -> Path:
    """Makes a folder as convert.py does from a Hub id, or with the given record."""
    folder = Path(above) / name
    folder.mkdir(parents=True, exist_ok=True)
    record = {"model": source} if isinstance(source, str) else source
    entries = {"model_type": "t5"} | ({} if record is None else {"converted_from": record})
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def test_a_name_is_a_folder_or_one_in_models_or_a_hub_id(fake_hub, capsys):
    folder = converted("flan-t5-small", "google/flan-t5-small")
    for name in ("flan-t5-small", "models/flan-t5-small", str(folder.absolute())):
        assert locate(name) in (folder, folder.absolute())
    assert capsys.readouterr().err == "" and not fake_hub.downloaded
    assert locate("google/flan-t5-small") == folder
    line = "google/flan-t5-small: taken from models/flan-t5-small, which was converted from it\n"
    assert capsys.readouterr().err == line and not fake_hub.downloaded
    # Another owner's model of the same name, a revision, and a name that is not in models/.
    assert locate("stranger/flan-t5-small") == fake_hub.snapshot("stranger/flan-t5-small")
    assert locate("flan-t5-small", "v1") == fake_hub.snapshot("flan-t5-small")
    assert locate("t5-base") == fake_hub.snapshot("t5-base")
    assert len(fake_hub.downloaded) == 3
    with pytest.raises(UserError, match="models/flan-t5-small is a folder, and a revision is of"):
        locate("models/flan-t5-small", "v1")


def test_models_of_the_working_directory_come_before_those_of_the_clone():
    in_clone = converted("t5-11b", "google-t5/t5-11b", "clone/models")
    demo = converted("target", None, "clone/demo")
    for name in ("t5-11b", "google-t5/t5-11b", "models/t5-11b"):
        assert locate(name).resolve() == in_clone.resolve()
    assert locate("demo/target").resolve() == demo.resolve()
    here = converted("t5-11b", "google-t5/t5-11b")
    assert locate("t5-11b").resolve() == here.resolve()


def test_another_folder_of_converted_models_replaces_models(tmp_path, monkeypatch):
    converted("t5-11b", "google-t5/t5-11b", "clone/models")
    mine = converted("t5-base", None, "mine").absolute()
    monkeypatch.setattr(hub, "MODELS", tmp_path / "mine")
    assert locate("t5-base") == locate("models/t5-base") == mine
    assert hub.source_folder("models/t5-base") == mine
    assert hub.origin("models/t5-base", None, mine) == {"folder": str(mine)}
    assert hub.converted("t5-11b") is None


def test_a_bundled_pair_that_is_not_there_is_named_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BUNDLED", tmp_path)
    with pytest.raises(UserError, match=f"missing in {tmp_path}; install the package again, or"):
        choose_pair(None, None)


@pytest.mark.parametrize("source", ["google-t5/t5-small", "t5-small"])
@pytest.mark.parametrize("name", ["google-t5/t5-small", "t5-small", "models/t5-small"])
def test_an_old_id_names_the_same_repository(source, name):
    folder = converted("t5-small", source)
    assert locate(name) == folder


@pytest.mark.parametrize("record", [None, {"folder": "t5"}, {"model": 3}, {"model": "a/t5-small"}])
def test_an_id_is_not_taken_from_a_folder_of_another_origin(record, fake_hub):
    folder = converted("t5-small", record)
    assert locate("google-t5/t5-small") == fake_hub.snapshot("google-t5/t5-small")
    assert locate("t5-small") == folder  # the folder's own name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "there is no model folder") for name in ("models/t5-11b", "./t5-11b", "a/b/c")),
        ("config.json", "config.json is a file"),
        ("", "name is empty"),
        ("~nosuchuser/t5", "leads nowhere"),
        ("loop", "leads nowhere"),
    ],
)
def test_a_path_to_no_folder_is_not_looked_up_on_the_hub(name, reason, fake_hub):
    Path("config.json").write_text("{}")
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError, match=reason):
        locate(name)
    assert not fake_hub.downloaded


# ---- pairs ---------------------------------------------------------------------------------------


def test_the_large_pair_is_the_default_once_both_are_converted():
    """Before that the bundled pair is the default, and the note names the missing models."""
    for missing in ("models/t5-11b and models/t5-small", "models/t5-small"):
        chosen = choose_pair(None, None)
        assert (chosen.target, chosen.draft) == (BUNDLED / "target", BUNDLED / "draft")
        assert chosen.note.endswith(f" few words; no {missing})")
        converted("t5-11b")
    converted("t5-small")
    chosen = choose_pair(None, None)
    assert (chosen.target, chosen.draft) == (Path("models/t5-11b"), Path("models/t5-small"))
    assert chosen.note == "target models/t5-11b, draft models/t5-small"
    assert choose_pair(None, "none").note == "target models/t5-11b, no draft"
    assert choose_pair(str(BUNDLED / "target"), None).draft == BUNDLED / "draft"


def test_lookup_can_be_chosen_alone_or_beside_a_draft():
    converted("flan-t5-xl")
    draft = converted("flan-t5-small")
    alone = choose_pair("flan-t5-xl", "lookup")
    assert (alone.draft, alone.copy) == (None, "lookup")
    both = choose_pair("flan-t5-xl", "flan-t5-small+lookup")
    assert (both.draft, both.copy) == (draft, "lookup")
    assert both.note.endswith("draft models/flan-t5-small, copying from the source")
    assert not choose_pair("flan-t5-xl", "flan-t5-small").copy
    with pytest.raises(UserError, match="name is empty"):
        choose_pair("flan-t5-xl", "+lookup")


def test_a_target_without_a_default_draft_decodes_regularly_and_says_so():
    for name in ("my-t5", "t5-base"):
        converted(name)
        chosen = choose_pair(name, None)
        assert chosen.draft is None
        assert "(no draft named and no default for it: regular decoding; " in chosen.note


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("google-t5/t5-3b", "google-t5/t5-small"),
        *((name, "google/flan-t5-small") for name in ("google/flan-t5-xl", "flan-t5-xl")),
        *((name, None) for name in ("flan-t5-small", "stranger/flan-t5-xl", "google/t5-3b", "")),
    ],
)
def test_a_name_has_the_draft_of_its_own_publisher(name, draft):
    assert default_draft(name) == draft


@pytest.mark.parametrize(
    "record", ["google/flan-t5-xl", {"model": "google/flan-t5-xl", "adapter": "my-lora"}]
)
def test_the_default_draft_comes_from_models_or_the_cache(fake_hub, record):
    converted("my-flan", record)
    note = choose_pair("my-flan", None).note
    assert note == (
        "target models/my-flan (regular decoding: its default draft is missing; get it with: python"
        " convert.py --model google/flan-t5-small)"
    )
    fake_hub.in_cache = {"google/flan-t5-small"}
    assert choose_pair("my-flan", None).draft == fake_hub.snapshot("google/flan-t5-small")
    converted("flan-t5-small", "stranger/flan-t5-small")
    assert choose_pair("my-flan", None).draft == fake_hub.snapshot("google/flan-t5-small")
    draft = converted("flan-t5-small", "google/flan-t5-small")
    chosen = choose_pair("my-flan", None)
    assert chosen.draft == draft
    assert chosen.note == "target models/my-flan, draft models/flan-t5-small (its default draft)"
    assert not fake_hub.downloaded


def test_the_default_draft_is_downloaded_only_for_a_target_named_by_its_hub_id(fake_hub, capsys):
    chosen = choose_pair("google/flan-t5-xl", None)
    assert fake_hub.downloaded == ["google/flan-t5-xl", "google/flan-t5-small"]
    assert chosen.note == (
        "target google/flan-t5-xl, draft google/flan-t5-small (its default draft)"
    )
    assert "its default draft is google/flan-t5-small; --draft-" in capsys.readouterr().err
    fake_hub.absent = {"google/flan-t5-small"}
    chosen = choose_pair("google/flan-t5-xl", None)
    assert chosen.note == (
        "target google/flan-t5-xl (regular decoding: no default draft, as google/flan-t5-small: "
        "cannot be downloaded)"
    )
    fake_hub.downloaded.clear()
    for draft in ("none", "lookup"):
        choose_pair("google/flan-t5-xl", draft)
    assert fake_hub.downloaded == ["google/flan-t5-xl"] * 2


@pytest.mark.parametrize(
    ("form", "dtype", "expected"),
    [
        ({"form": "safetensors"}, None, "bfloat16"),
        ({"form": "zip"}, None, "bfloat16"),
        ({"form": "zip", "stored": "bfloat16"}, None, "bfloat16"),
        ({"form": "safetensors", "stored": "bfloat16"}, None, None),
        ({"form": "safetensors"}, "float32", "float32"),
    ],
)
def test_a_gpu_computes_float32_and_bin_folders_in_bfloat16(
    monkeypatch, capsys, form, dtype, expected
):
    """One line says so and how later starts become faster; the draft takes the target's type."""
    import checkpoints

    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    state = checkpoints.random_state(checkpoints.TINY, form.get("stored", "float32"))
    folder = checkpoints.save(state, Path("source"), form["form"], config=checkpoints.TINY)
    dtypes = []

    def load(folder, dtype, *_, **__):
        dtypes.append(dtype)
        raise UserError("enough")

    monkeypatch.setattr(loading, "load", load)
    with pytest.raises(UserError, match="enough"):
        loading.load_pair(loading.ModelPair(folder, None, "", ""), dtype)
    assert dtypes == [expected]
    noted = dtype is None and expected is not None
    line = "computing in bfloat16; later starts are faster after: python convert.py --model source"
    assert (line in capsys.readouterr().err) == noted


def test_a_draft_computes_in_its_targets_type(monkeypatch, tmp_path):
    for module in (loading, checkpoint):
        monkeypatch.setattr(module, "on_cpu", lambda: False)  # then each folder's type counts
    target = convert(BUNDLED / "target", tmp_path / "target", "float32")
    pair = loading.ModelPair(target, BUNDLED / "draft", "", "")  # the draft is in bfloat16
    loaded = loading.load_pair(pair, None)
    assert loaded.draft.model.dtype == loaded.target.dtype == mx.float32
