"""Tests the names of models, and the models used when none is named."""

import json
from pathlib import Path

import pytest

from mlx_t5 import loading, names
from mlx_t5.errors import UserError
from mlx_t5.network import memory


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Runs every test in a separate folder without converted models."""
    monkeypatch.chdir(tmp_path)


def converted(*names: str) -> None:
    for name in names:
        (Path("models") / name).mkdir(parents=True, exist_ok=True)


def refuse_to_convert(name: str, folder: Path) -> None:
    raise AssertionError(f"{name} must not be converted")


def chosen_for(model, draft_model, regular=False):
    return loading.choose_pair(model, draft_model, refuse_to_convert, regular)


def test_the_large_pair_is_the_default_once_both_are_converted():
    """Before that the bundled pair is the default, and the note names the missing models."""
    bundled = (names.BUNDLED / "target", names.BUNDLED / "draft")
    for missing in ("models/t5-11b and models/t5-small", "models/t5-small"):
        chosen = chosen_for(None, None)
        assert (chosen.target, chosen.draft) == bundled
        assert f"the bundled pair: no {missing}" in chosen.note
        converted("t5-11b")
    converted("t5-small")
    chosen = chosen_for(None, None)
    assert (chosen.target, chosen.draft) == (Path("models/t5-11b"), Path("models/t5-small"))
    assert chosen.note == "target models/t5-11b, draft models/t5-small"
    assert chosen_for(str(bundled[0]), None).draft == bundled[1]


@pytest.mark.parametrize("how", [("none", False), (None, True), ("t5-small", True)])
def test_regular_decoding_takes_no_draft(how):
    converted("t5-11b", "t5-small")
    chosen = chosen_for(None, *how)
    assert chosen.draft is None
    assert "regular decoding" in chosen.note


def test_lookup_can_be_chosen_alone_or_beside_a_draft():
    converted("flan-t5-xl", "flan-t5-small")
    alone = chosen_for("flan-t5-xl", "lookup")
    assert (alone.draft, alone.lookup) == (None, True)
    both = chosen_for("flan-t5-xl", "flan-t5-small+lookup")
    assert (both.draft, both.lookup) == (Path("models/flan-t5-small"), True)
    assert both.note.endswith("draft models/flan-t5-small, copying from the source")
    assert not chosen_for("flan-t5-xl", "flan-t5-small").lookup
    assert not chosen_for("flan-t5-xl", "lookup", regular=True).lookup


def test_a_target_without_a_default_draft_decodes_regularly_and_says_so():
    converted("my-t5", "t5-base", "t5-small")
    for name in ("my-t5", "t5-base"):
        chosen = chosen_for(name, None)
        assert chosen.draft is None
        assert "(no draft named and no default for it: regular decoding; " in chosen.note


def test_the_default_draft_of_a_target_that_was_converted():
    converted("t5-3b", "t5-small", "my-flan")
    assert chosen_for("t5-3b", None).draft == Path("models/t5-small")
    origin = {"model": "google/flan-t5-xl", "adapter": "my-lora"}
    for source in ("google/flan-t5-xl", origin):
        converted_from("my-flan", source)
        chosen = chosen_for("my-flan", None)
        hint = "get it with: python convert.py --model google/flan-t5-small"
        assert chosen.draft is None and hint in chosen.note
    converted_from("flan-t5-small", "google/flan-t5-small")
    chosen = chosen_for("my-flan", None)
    assert chosen.note == "target models/my-flan, draft models/flan-t5-small (its default draft)"
    assert chosen_for("my-flan", "none").note == "target models/my-flan (regular decoding)"


SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}


def test_a_default_draft_never_ends_in_an_error():
    """This includes folders without a record, and folders that hold a different model."""
    converted("flan-t5-xl", "flan-t5-small")
    for folder, vocab_size in (("flan-t5-xl", 50), ("flan-t5-small", 60)):
        config = {"model_type": "t5", "vocab_size": vocab_size, **SIZES}
        (Path("models") / folder / "config.json").write_text(json.dumps(config))
    note = "regular decoding: models/flan-t5-small is not its default draft, google/flan-t5-small"
    assert note in chosen_for("flan-t5-xl", None).note
    converted_from("flan-t5-small", "stranger/flan-t5-small")
    assert note in chosen_for("flan-t5-xl", None).note


@pytest.fixture
def hub(monkeypatch):
    """Returns a fake Hub: `fetch(model)` chooses a pair; it has sets `in_cache` and `absent`."""

    class Hub:
        requests: list[str] = []
        in_cache: set[str] = set()
        absent: set[str] = set()

        def resolve(self, name, revision=None):
            self.requests.append(name)
            if name in self.absent:
                raise UserError(f"{name}: cannot be downloaded")
            return Path("snapshot")

        def convert(self, name, folder):
            assert name == self.requests[-1]
            folder.mkdir(parents=True)

        def fetch(self, model, draft_model=None, **more):
            self.requests = []
            chosen = loading.choose_pair(model, draft_model, self.convert, fetch=True, **more)
            return chosen, self.requests

    fake = Hub()
    monkeypatch.setattr("mlx_t5.checkpoints.hub.resolve", fake.resolve)
    monkeypatch.setattr("mlx_t5.loading.is_cached", lambda name: name in fake.in_cache)
    monkeypatch.setattr(names, "_is_mlx", lambda folder: False)
    return fake


def test_an_unavailable_default_draft_is_reported_and_skipped(hub, monkeypatch):
    hub.absent = {"google/flan-t5-small"}
    chosen, requests = hub.fetch("google/flan-t5-xl")
    assert requests == ["google/flan-t5-xl", "google/flan-t5-small"]
    assert chosen.note == (
        "target models/flan-t5-xl (regular decoding: no default draft, as google/flan-t5-small: "
        "cannot be downloaded)"
    )
    # Once the target has been converted, nobody expects a download.
    chosen, requests = hub.fetch("google/flan-t5-xl")
    assert not requests and "its default draft is not there" in chosen.note
    hub.absent, hub.in_cache = set(), {"google/flan-t5-small"}
    chosen, requests = hub.fetch("google/flan-t5-xl")
    assert (requests, chosen.draft) == (["google/flan-t5-small"], Path("models/flan-t5-small"))


@pytest.mark.parametrize(
    "how", [{"regular": True}, {"draft_model": "none"}, {"draft_model": "lookup"}]
)
def test_no_default_draft_is_downloaded_where_it_would_not_be_used(hub, how):
    hub.in_cache = {"google/flan-t5-small"}
    assert hub.fetch("google/flan-t5-xl", **how)[1] == ["google/flan-t5-xl"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "there is no model folder") for name in ("models/t5-11b", "./t5-11b", "~/t5")),
        *((name, "there is no model folder") for name in ("/no/such/model", "a/b/c")),
        ("config.json", "config.json is a file"),
    ],
)
def test_a_path_to_no_folder_is_not_looked_up_on_the_hub(name, reason):
    Path("config.json").write_text("{}")
    with pytest.raises(UserError, match=reason):
        names.locate(name, refuse_to_convert)


def converted_from(folder: str, source: str | dict) -> None:
    """Makes a folder as convert.py does from a Hub id, or with the given record."""
    converted(folder)
    record = source if isinstance(source, dict) else {"model": source, "commit": "0" * 40}
    text = json.dumps({"model_type": "t5", "converted_from": record})
    (Path("models") / folder / "config.json").write_text(text)


def test_another_owners_model_of_the_same_name_is_refused():
    converted_from("flan-t5-small", "google/flan-t5-small")
    for name in ("google/flan-t5-small", "flan-t5-small", "models/flan-t5-small"):
        assert names.locate(name, refuse_to_convert) == Path("models/flan-t5-small")
    with pytest.raises(UserError) as error:
        chosen_for("stranger/flan-t5-small", None)
    assert str(error.value) == (
        "models/flan-t5-small was converted from google/flan-t5-small, not from "
        "stranger/flan-t5-small; give models/flan-t5-small to run it, or convert the other one: "
        "python convert.py --model stranger/flan-t5-small --mlx-path "
        "models/stranger-flan-t5-small"
    )
    with pytest.raises(UserError, match="not from stranger"):
        chosen_for("google/flan-t5-small", "stranger/flan-t5-small+lookup")


@pytest.mark.parametrize("source", ["google-t5/t5-small", "t5-small"])
@pytest.mark.parametrize("name", ["google-t5/t5-small", "t5-small", "models/t5-small"])
def test_an_old_id_names_the_same_repository(source, name, capsys):
    converted_from("t5-small", source)
    assert names.locate(name, refuse_to_convert) == Path("models/t5-small")
    assert capsys.readouterr().err == ""


def test_a_strangers_t5_is_not_taken_for_the_original():
    converted_from("t5-small", "stranger/t5-small")
    converted_from("t5-11b", "google-t5/t5-11b")
    for name in ("t5-small", "google-t5/t5-small"):
        with pytest.raises(UserError, match="from stranger/t5-small, not from google-t5/t5-small"):
            names.locate(name, refuse_to_convert)
    with pytest.raises(UserError, match="from stranger/t5-small, not from google-t5/t5-small"):
        chosen_for(None, None)
    assert chosen_for("t5-11b", None).draft is None
    assert names.locate("models/t5-small", refuse_to_convert) == Path("models/t5-small")


@pytest.mark.parametrize("record", [None, {"folder": "flan-t5-small"}, {"model": 3}, [], "x"])
def test_a_folder_without_a_record_is_accepted_with_a_warning(record, capsys):
    converted_from("flan-t5-small", {})
    text = json.dumps({"converted_from": record} if record is not None else {})
    Path("models/flan-t5-small/config.json").write_text(text)
    assert names.locate("flan-t5-small", refuse_to_convert) == Path("models/flan-t5-small")
    assert capsys.readouterr().err == ""
    name = "google/flan-t5-small"
    assert names.locate(name, refuse_to_convert) == Path("models/flan-t5-small")
    warning = capsys.readouterr().err
    assert warning.startswith("warning: models/flan-t5-small does not say") and name in warning
    assert warning.count("\n") == 1


@pytest.mark.parametrize("names", [("", None), ("models/x", ""), ("models/x", "+lookup")])
def test_an_empty_name_is_no_folder(names):
    converted("x")
    with pytest.raises(UserError, match="name is empty"):
        chosen_for(*names)


def test_a_hint_comes_before_the_models_are_loaded(reference_of, capsys, monkeypatch):
    monkeypatch.setattr(memory, "on_cpu", lambda: False)
    folder, messages = reference_of("t5").folder, []

    def load(*_, **__):
        messages.append(capsys.readouterr().err)
        return None, None

    monkeypatch.setattr(loading, "load", load)
    loading.load_pair(loading.ModelPair(folder, None, False, ""), None)
    assert messages == [f"hint: {folder} is in float32; --dtype bfloat16 takes half the memory\n"]
    loading.load_pair(loading.ModelPair(folder, None, False, ""), "float32")
    assert messages[1:] == [""]
