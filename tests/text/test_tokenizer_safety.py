"""Tests damaged and hostile tokenizer files, and that loading has no side effects."""

import base64
import json
import shutil
import socket

import pytest

from mlx_t5.errors import UserError
from mlx_t5.text.prompts import token_ids
from mlx_t5.text.tokenizer import load_tokenizer
from tokenizer_folders import CLASSES, old_json, settings, write

KINDS = ["mt5", "mt5-json", "byt5", *CLASSES]


def test_a_folder_without_a_tokenizer_gives_none(folders, tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert load_tokenizer(str(tmp_path)) is None


def test_a_damaged_character_map_is_reported(folders, tmp_path):
    """The tokenizers library panics on such maps, at loading or only on some texts."""
    state, text = old_json(folders / "t5", 100), "".join(map(chr, range(32, 0x3400)))
    charsmap = base64.b64decode(state["normalizer"]["precompiled_charsmap"])
    for damaged in (charsmap[:50_000], b"\xff\xff\xff\xff" + charsmap[4:]):
        state["normalizer"]["precompiled_charsmap"] = base64.b64encode(damaged).decode()
        with pytest.raises(UserError, match=r"^[^\n]+$"):
            token_ids(text, load_tokenizer(write(tmp_path / "m", state, settings("t5"))), 1000)


@pytest.mark.parametrize(
    ("kind", "removed", "own", "message"),
    [
        ("t5", None, {"extra_ids": -1}, "extra_ids is -1"),
        ("t5", None, {"extra_ids": 10**9}, "extra_ids is"),
        ("t5", None, {"extra_ids": "x"}, "extra_ids is 'x'"),
        ("t5-json", None, {"gguf_file": "../private"}, "name other files to read: gguf_file"),
        ("t5", None, {"fast_tokenizer_files": ["../tokenizer.1.json"]}, "fast_tokenizer_files"),
        # transformers would invent a vocabulary of special tokens without any word.
        ("t5", "spiece.model", {}, "T5Tokenizer reads spiece.model or tokenizer.json, which is"),
        ("bert", None, {"tokenizer_class": "T5Tokenizer"}, "name another tokenizer_class"),
        ("bert", None, {"tokenizer_class": None}, "T5Tokenizer reads"),
        ("bert", "vocab.txt", {}, "BertTokenizer reads vocab.txt"),
        ("gpt2", "merges.txt", {}, "cannot load the tokenizer"),
        ("roberta", None, {"tokenizer_class": "Nonsense"}, "cannot load the tokenizer"),
    ],
)
def test_unusable_folders_are_refused(folders, tmp_path, kind, removed, own, message):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    if removed:
        (folder / removed).unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["mt5", "mt5-json", "gpt2", "llama"])
def test_damaged_files_are_refused_in_one_line(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    names = ("spiece.model", "tokenizer.json", "vocab.json", "tokenizer.model")
    path = next(folder / name for name in names if (folder / name).exists())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_the_folder_never_runs_and_nothing_is_fetched(folders, tmp_path, monkeypatch, kind):
    fetched = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **how: fetched.append(address))
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    for name in ("tokenizer_config.json", "config.json"):
        settings = json.loads((folder / name).read_text())
        settings["auto_map"] = dict.fromkeys(("AutoTokenizer", "AutoConfig"), ["theirs.Evil"] * 2)
        (folder / name).write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(folder)
    except UserError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists() and not fetched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_cannot_name_other_files(folders, tmp_path, kind, name):
    """transformers reads paths from its settings."""
    folder, private = shutil.copytree(folders / kind, tmp_path / "m"), tmp_path / "private"
    private.write_text("no tokenizer")
    own = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    paths = dict.fromkeys(("vocab_file", "merges_file", "tokenizer_file"), str(private))
    (folder / name).write_text(json.dumps(own | paths))
    if name == "special_tokens_map.json":
        with pytest.raises(UserError, match="settings name other files to read: vocab_file"):
            load_tokenizer(folder)
    else:
        text = "the garçon 你好"
        assert load_tokenizer(folder).encode(text) == load_tokenizer(folders / kind).encode(text)
