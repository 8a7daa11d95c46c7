"""Tests --upload-repo: the files sent, the text of the card, and refusals beforehand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

import sentence_folders
from command_line import byte_model
from convert import main
from fake_hub import FakeApi
from mlx_t5.cli.uploading import CARD, check_repository, conversion_card, model_files, upload
from mlx_t5.convert import convert
from mlx_t5.errors import UserError

SAID = {
    "license": "apache-2.0",
    "language": ["en", "fr"],
    "pipeline_tag": "translation",
    "tags": ["t5"],
    "widget": [{"text": "not for us"}],
}


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr("mlx_t5.cli.uploading.HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "sent", {})
    return FakeApi


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_conversion_is_sent_file_by_file(api, tmp_path, capsys):
    source, folder = byte_model(tmp_path / "byt5"), tmp_path / "out"
    (source / CARD).write_text(f"---\n{yaml.safe_dump(SAID)}---\n# ByT5\n")
    options = ["-q", "--q-group-size", "32", "--upload-repo", "me/byt5-4bit"]
    assert main(["--model", str(source), "--mlx-path", str(folder), *options]) == 0
    sent = api.sent["me/byt5-4bit"]
    assert sent == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "model.safetensors.index.json", CARD} < set(sent)
    assert "sent: https://huggingface.co/me/byt5-4bit/commit/1" in capsys.readouterr().err
    card = sent[CARD].decode()
    said = {name: value for name, value in SAID.items() if name != "widget"}
    assert metadata(card) == said | {"library_name": "mlx", "tags": ["t5", "mlx", "4-bit"]}
    assert 'mlx_t5.generate --model me/byt5-4bit --prompt "…"' in card


@pytest.mark.parametrize(
    "name, role, reason",
    [
        ("me/x", "read", "the token may only read"),
        ("x", "write", "'x' has no owner"),
        ("me/a b", "write", "Repo id must "),
    ],
)
def test_an_impossible_upload_is_refused(api, monkeypatch, name, role, reason):
    monkeypatch.setattr(api, "role", role)
    with pytest.raises(UserError, match=f"--upload-repo: .*{reason}.*; give OWNER/NAME, and a tok"):
        check_repository(name)


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
    monkeypatch.setattr("mlx_t5.cli.uploading.hf_hub_download", lambda *_: pytest.fail("looked up"))
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


def test_the_card_of_a_model_of_the_hub_names_it_and_its_license(tmp_path, monkeypatch):
    path = tmp_path / CARD
    path.write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr("mlx_t5.cli.uploading.hf_hub_download", lambda name, _: str(path))
    record = {"model": "t5-small", "adapter": "my-lora"}
    card = conversion_card("me/x", converted(tmp_path / "made", converted_from=record), "t5-small")
    assert metadata(card)["base_model"] == "google-t5/t5-small" and "license: mit" in card
    assert "google-t5/t5-small with adapter my-lora, converted to MLX: bfloat16." in card
