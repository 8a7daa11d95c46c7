"""Tests damaged, missing and hostile tokenizer files, and that loading has no side effects."""

import base64
import json
import logging
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_t5 import backend
from mlx_t5.errors import UserError
from mlx_t5.text.prompts import token_ids
from mlx_t5.text.tokenizer import load_tokenizer
from tokenizer_folders import old_json, settings, write

ROOT = Path(backend.__file__).resolve().parents[1]


def test_a_folder_without_a_tokenizer_gives_none(folders, tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert load_tokenizer(str(tmp_path)) is None


def damaged(state, places):
    """Returns the tokenizer.json with changed bytes at these places of its character map."""
    charsmap = bytearray(base64.b64decode(state["normalizer"]["precompiled_charsmap"]))
    for place in places:
        charsmap[place] ^= 0x5B
    text = base64.b64encode(bytes(charsmap)).decode()
    return {**state, "normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


@pytest.mark.slow
def test_a_damaged_character_map_is_reported(folders, tmp_path, capfd):
    """The tokenizers library panics on such maps, at loading or only on some texts."""
    state, count, text = old_json(folders / "t5", 100), 0, "".join(map(chr, range(32, 0x3400)))
    rng = random.Random(0)
    for i in range(60):
        places = [rng.randrange(240_000 if i % 3 else 8) for _ in range(rng.choice([1, 9]))]
        folder = write(tmp_path / "m", damaged(state, places), settings("t5"))
        try:
            load_tokenizer(folder).encode(text)
            count += 1
        except UserError as error:
            assert "\n" not in str(error) and "precompiled_charsmap is damaged" in str(error)
    assert 0 < count < 60
    assert "panic" not in capfd.readouterr().err


def test_a_panic_of_the_tokenizer_makes_a_bad_prompt(folders):
    class Panicking:
        def encode(self, text):
            raise type("PanicException", (BaseException,), {})("index out of range\nmore")

    class Interrupted:
        def encode(self, text):
            raise KeyboardInterrupt

    with pytest.raises(UserError, match=r"cannot read this prompt \(index out of range\)$"):
        token_ids("the store", Panicking(), 100)
    with pytest.raises(KeyboardInterrupt):
        token_ids("the store", Interrupted(), 100)


@pytest.mark.parametrize("extra_ids", [-1, 10**9, "x", 2.0])
def test_a_bad_number_of_sentinels_is_refused(folders, tmp_path, extra_ids):
    folder = shutil.copytree(folders / "t5", tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings("t5", extra_ids=extra_ids)))
    with pytest.raises(UserError, match="extra_ids is"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["mt5", "mt5-json"])
def test_damaged_files_are_refused_in_one_line(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    path = next(p for p in folder.iterdir() if p.name in ("spiece.model", "tokenizer.json"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_missing_vocabulary_is_reported(folders, tmp_path):
    """transformers would invent a vocabulary of special tokens without any word."""
    folder = shutil.copytree(folders / "t5", tmp_path / "m")
    (folder / "spiece.model").unlink()
    with pytest.raises(UserError, match="neither tokenizer.json nor spiece.model is there"):
        load_tokenizer(folder)


@pytest.mark.slow
def test_torch_is_left_out(folders):
    """Importing torch would take longer than loading a small model and decoding a token."""
    code = (
        "import sys; from mlx_t5.text import tokenizer\n"
        "tokenizer.load_tokenizer(sys.argv[1]).encode('a'); print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folders / "t5-json")]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "transformers" in shown.split() and "torch" not in shown.split()


@pytest.mark.parametrize("kind", ["mt5", "mt5-json", "byt5"])
def test_loading_uses_no_network(folders, monkeypatch, kind):
    calls = []

    def refuse(*arguments):
        calls.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(folders / kind).encode("the store")
    assert calls == []


@pytest.mark.parametrize("kind", ["mt5", "mt5-json", "byt5"])
def test_code_in_the_folder_never_runs(folders, tmp_path, kind):
    folder = shutil.copytree(folders / kind, tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["theirs.Evil", "theirs.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(folder)
    except UserError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["mt5", "mt5-json"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_cannot_name_other_files(folders, tmp_path, kind, name):
    """transformers reads paths from its settings, and prefers a tokenizer.model."""
    folder, private = shutil.copytree(folders / kind, tmp_path / "m"), tmp_path / "private"
    private.write_text("no tokenizer")
    (folder / "tokenizer.model").symlink_to(private)
    own = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    paths = dict.fromkeys(("vocab_file", "tokenizer_file"), str(private))
    (folder / name).write_text(json.dumps(own | paths))
    text = "the garçon 你好"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(folders / kind).encode(text)
    for entry in ({"gguf_file": "../private"}, {"fast_tokenizer_files": ["../tokenizer.1.json"]}):
        (folder / name).write_text(json.dumps(own | entry))
        with pytest.raises(UserError, match=f"settings name other files to read: {[*entry][0]}"):
            load_tokenizer(folder)


def test_long_prompts_raise_no_warning(folders, tmp_path, caplog):
    folder = shutil.copytree(folders / "t5", tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 9}))
    logger = logging.getLogger("transformers")  # does not propagate to the root
    logger.addHandler(caplog.handler)
    try:
        assert len(load_tokenizer(folder).encode("the store " * 50)) > 100
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
