"""Tests --upload-repo: the files sent, the text of the card, and refusals beforehand."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import sentence_folders
from command_line import ROOT, byte_model
from convert import convert
from fake_hub import Answer, FakeHub, as_json, serve
from mlx_t5.cli.uploading import CARD, conversion_card, model_files, upload
from mlx_t5.errors import UserError
from standard_error import messages

SOURCE = "google/byt5-small"
SAID = {
    "license": "apache-2.0",
    "language": ["en", "fr"],
    "pipeline_tag": "translation",
    "tags": ["t5"],
    "widget": [{"text": "not for us"}],
}
TOKEN = {"HF_TOKEN": "hf_writes", "HF_HUB_DISABLE_XET": "1"}
WRITERS = {"hf_writes": "write", "hf_reads": "read"}


class WritableHub(FakeHub):
    """A Hub that also receives files: `roles` has "write" or "read" for each token."""

    def __init__(self, repos: dict, roles: dict[str, str]) -> None:
        super().__init__(repos)
        self.roles, self.large = roles, {}

    def answer(self, path: str, token: str, body: bytes) -> Answer:
        if not body and "whoami" not in path:
            return super().answer(path, token, body)
        plain = unquote(urlsplit(path).path)
        if plain.startswith("/large/"):
            self.large[plain.removeprefix("/large/")] = body
            return 200, {}, b""
        if token not in self.roles or body and self.roles[token] != "write":
            return 401, {}, b'{"error": "Invalid username or password."}'
        if plain == "/api/whoami-v2":
            return as_json({"name": "me", "auth": {"accessToken": {"role": self.roles[token]}}})
        return as_json(self._received(plain, body))

    def _received(self, path: str, body: bytes) -> dict:
        repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if "/commit/" in path:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] != "header":
                    self.repos[repo][entry["value"]["path"]] = self._content(entry["value"])
            return {"commitUrl": f"{self.endpoint}/{repo}/commit/1", "commitOid": "1" * 40}
        request = json.loads(body)
        if path == "/api/repos/create":
            owner = request.get("organization") or request["name"].partition("/")[0]
            name = f"{owner}/{request['name'].rpartition('/')[2]}"
            self.repos.setdefault(name, {})
            return {"url": f"{self.endpoint}/{name}"}
        for entry in request.get("objects", ()):  # large files
            entry["actions"] = {"upload": {"href": f"{self.endpoint}/large/{entry['oid']}"}}
        for file in request.get("files", ()):
            large = file["path"].endswith(".safetensors")
            file |= {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        return {"errors": [], "warnings": []} | request

    def _content(self, value: dict) -> bytes:
        if "content" in value:
            return base64.b64decode(value["content"])
        assert hashlib.sha256(self.large[value["oid"]]).hexdigest() == value["oid"]
        return self.large[value["oid"]]


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a Hugging Face folder whose card names its license."""
    folder = byte_model(tmp_path_factory.mktemp("source") / "byt5")
    (folder / CARD).write_text(f"---\n{yaml.safe_dump(SAID)}---\n# ByT5\n")
    return folder


@pytest.fixture
def hub(source):
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    with serve(WritableHub({SOURCE: files}, WRITERS)) as running:
        yield running


@pytest.mark.slow
def test_a_conversion_is_sent_file_by_file_and_can_be_loaded_by_its_name(hub, tmp_path):
    options = ["--model", SOURCE, "-q", "--q-group-size", "32", "--upload-repo", "me/byt5-4bit"]
    done = hub.python(tmp_path, str(ROOT / "convert.py"), *options, **TOKEN)
    folder, err = tmp_path / "models" / "byt5-small", done.stderr
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), err
    assert "hf_" not in done.stdout + err, "a token is shown"
    sent = hub.repos["me/byt5-4bit"]
    assert sent == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "model.safetensors.index.json", CARD} < set(sent)
    commit = hashlib.sha1(SOURCE.encode()).hexdigest()  # as computed by the test's Hub
    assert json.loads(sent["config.json"])["converted_from"] == {"model": SOURCE, "commit": commit}
    assert f"sending to me/byt5-4bit on the Hugging Face Hub: {', '.join(sorted(sent))}\n" in err
    assert f"sent: {hub.endpoint}/me/byt5-4bit/commit/1" in err
    card = sent[CARD].decode()
    assert metadata(card) == {
        "library_name": "mlx",
        "base_model": SOURCE,
        "license": "apache-2.0",
        "language": ["en", "fr"],
        "pipeline_tag": "translation",
        "tags": ["t5", "mlx", "4-bit"],
    }
    assert f"{SOURCE}, converted to MLX: 4 bits a weight (affine, groups of 32)." in card
    assert 'python main.py --model me/byt5-4bit --prompt "…"' in card
    code = "from model import load; print(load('me/byt5-4bit')[0].weights_read().kind)"
    loaded = hub.python(tmp_path, "-c", code)
    assert loaded.stdout == "affine\n", loaded.stderr


@pytest.mark.slow
def test_an_impossible_upload_is_refused_before_the_work(hub, tmp_path):
    cure = "; give OWNER/NAME, and a token that may write with `hf auth login`"
    refused = {
        ("me/x", ""): "no token found",
        ("me/x", "hf_wrong"): "Invalid ",
        ("me/x", "hf_reads"): "the token may only read",
        ("x", "hf_writes"): "'x' has no owner",
        ("me/a b", "hf_writes"): "Repo id must ",
    }
    code = (
        "import os, sys, convert, distill\n"
        f"for name, os.environ['HF_TOKEN'] in {list(refused)}:\n"
        f"    options = ['--model', {SOURCE!r}, '--upload-repo', name]\n"
        "    assert convert.main(options) == 2\n"
        "    assert distill.main([*options, '--data', 'none', '--output', 'draft']) == 2"
    )
    done = hub.python(tmp_path, "-c", code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = messages(done.stderr)
    assert lines[::2] == lines[1::2], "distill.py says the same"
    for line, reason in zip(lines[::2], refused.values(), strict=True):
        assert line.startswith("error: --upload-repo: ") and reason in line and line.endswith(cure)
    assert not (tmp_path / "models").exists() and not hub.fetched


def test_only_the_models_files_are_sent(tmp_path):
    """Other files in the folder stay, and links are never followed."""
    pooled = sentence_folders.pooling("mean"), sentence_folders.dense()
    sentences = sentence_folders.folder_of(tmp_path / "in", *pooled)
    folder = convert(sentences, tmp_path / "out", dtype="float32")
    (folder / CARD).write_text("a card")
    expected = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert "2_Dense/pytorch_model.bin" in expected and model_files(folder) == expected
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    for name in ("notes.txt", ".env", "optimizer.safetensors", "model-00002-of-00003.safetensors"):
        (folder / name).write_text("mine")
    for name in ("checkpoints", ".cache", "2_Dense/deeper"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("mine")
    (folder / "2_Dense" / "notes.txt").write_text("mine")
    (folder / "3_Dense").symlink_to(secret)
    (folder / "generation_config.json").symlink_to(secret / "config.json")
    os.mkfifo(folder / "spiece.model")
    assert model_files(folder) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no\nroute")])
def test_a_failed_upload_leaves_the_folder_complete(tmp_path, monkeypatch, capsys, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    folder = converted(tmp_path / "made")
    complete = f"; the folder is complete: `hf upload me/x {folder}` sends it"
    if isinstance(error, KeyboardInterrupt):
        assert upload(folder, "me/x", lambda name: f"the card of {name}") == 130
        assert capsys.readouterr().err.endswith(f"interrupted{complete}\n")
    else:
        with pytest.raises(UserError) as refused:
            upload(folder, "me/x", lambda name: f"the card of {name}")
        assert str(refused.value) == f"me/x: cannot be sent (OSError: no route){complete}"
    assert (folder / CARD).read_text() == "the card of me/x"


def converted(folder: Path, **more: object) -> Path:
    folder.mkdir()
    config = {"model_type": "t5", "torch_dtype": "bfloat16", "converted_from": {"folder": "my-t5"}}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def test_a_card_says_only_known_facts(tmp_path, capsys, monkeypatch):
    """The source is local and has no card, a damaged card, or a card that is a link."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("looked up"))
    folder, source = converted(tmp_path / "made"), tmp_path / "my-t5"
    source.mkdir()
    plain = {"library_name": "mlx", "tags": ["mlx"]}
    secret = tmp_path / "secret"
    secret.write_text("---\nlicense: mit\n---\n")
    for write in (
        lambda path: None,
        lambda path: path.write_text("---\n{license: [\n---\n"),
        lambda path: (path.unlink(), path.symlink_to(secret)),
    ):
        write(source / CARD)
        card = conversion_card("me/x", folder, str(source))
        assert metadata(card) == plain and "my-t5, converted to MLX: bfloat16." in card
        assert "no license is known" in capsys.readouterr().err
    (source / CARD).unlink()
    (source / CARD).write_text("---\nlicense: mit\nbase_model: google/t5-v1_1-base\n---\n")
    expected = plain | {"license": "mit", "base_model": "google/t5-v1_1-base"}
    assert metadata(conversion_card("me/x", folder, str(source))) == expected
    assert capsys.readouterr().err == ""
