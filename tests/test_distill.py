"""Tests distill.py from a file of prompts to a draft and its verdict, and resumed runs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import distill
from convert import convert
from decoder import SpeculativeDecoder
from fake_hub import FakeApi
from mlx_t5 import loading
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.disk import BUNDLED
from mlx_t5.network.draft_vocabulary import narrow
from mlx_t5.network.sharing import ENTRY
from mlx_t5.training import teacher_answers, verdict, vocabulary
from mlx_t5.training.draft_folder import save_draft
from mlx_t5.training.learner import Learner
from mlx_t5.training.trainer import Evaluation
from model import load
from trainings import TARGET, check_refused, heard, same, shortest_prompts, stopped_at_each, weights

QUICK = ["--iters", "14", "--batch-size", "8", "--steps-per-eval", "7", "--save-every", "5"]
QUICK += ["--max-tokens", "16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the command line for the bundled target and short prompts; two lines are bad."""
    path = tmp_path_factory.mktemp("data") / "prompts.txt"
    path.write_bytes("\n".join([*shortest_prompts(60), "", "last"]).encode() + b"\n\xff\n")

    def command(output: Path, *more: str) -> int:
        options = ["--model", TARGET, "--data", str(path), "--output", str(output)]
        return distill.main([*options, *QUICK, *more])

    return command


@pytest.fixture(scope="module", autouse=True)
def quickly():
    """Makes measurements short, files of answers small and the draft's vocabulary narrow."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LEAST_TURNS": 1, "REPEATS": 1, "BUDGET_SECONDS": 0}.items():
            patch.setattr(verdict, name, value)
        patch.setattr(teacher_answers, "SHARD", 16)
        patch.setattr(vocabulary, "ENOUGH", 0.8)  # these few answers have few tokens
        yield


@pytest.fixture
def no_verdict(monkeypatch):
    monkeypatch.setattr(distill.Distillation, "_verdict", lambda self, path: "no verdict")


@pytest.fixture(scope="module")
def trial(run, tmp_path_factory):
    """Returns the output and the messages of a run without interruption."""
    output = tmp_path_factory.mktemp("trial") / "draft"
    with pytest.MonkeyPatch.context() as patch, heard() as (log, printed):
        patch.setattr("huggingface_hub.HfApi", FakeApi)
        assert run(output, "--upload-repo", "me/draft") == 0
    return output, "\n".join([*log, *printed])


@pytest.mark.slow
def test_a_few_steps_make_a_sharing_draft_and_a_verdict(trial):
    output, log = trial
    assert "left out: " in log and "line 61 is empty" in log and "line 63 is not UTF-8" in log
    scores = re.findall(r"step (\d+): .*acceptance ([\d.]+)%, ([\d.]+) tokens a call", log)
    assert [int(step) for step, *_ in scores] == [0, 7, 14]
    assert float(scores[-1][1]) > float(scores[0][1]) + 10 and float(scores[-1][2]) > 1.4
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", log)]
    assert losses[1] < losses[0] < 4
    rows = [line.split(" | ")[0].removeprefix("| ") for line in log.splitlines() if " | " in line]
    assert {"none", str(output), "lookup"} <= set(rows)
    assert re.search("^(recommended|keep)", log, re.MULTILINE)
    config = json.loads((output / "config.json").read_text())
    assert config["num_decoder_layers"] == 1 and ENTRY in config
    assert config["draft_vocab_size"] == len(weights(output)["d2t"]) < 3072
    assert all(name.startswith("decoder.") or name == "d2t" for name in weights(output))


@pytest.mark.slow
def test_a_draft_is_sent_with_its_verdict(trial):
    """The card names the draft by its Hub id and leaves out local models."""
    output, log = trial
    assert FakeApi.sent["me/draft"] == {file.name: file.read_bytes() for file in output.iterdir()}
    assert "sent: https://huggingface.co/me/draft/commit/1" in log
    card = FakeApi.sent["me/draft"]["README.md"].decode()
    row = next(line for line in log.splitlines() if line.startswith(f"| {output} |"))
    assert row.replace(str(output), "me/draft") in card and "| lookup |" in card
    assert str(output) not in card and "demo/draft" not in card
    assert "A draft for target. " in card and "\n\nMeasured on " in card
    assert 'from_pretrained("target", draft="me/draft")' in card


@pytest.mark.slow
def test_a_run_stopped_anywhere_resumes_to_the_same_draft(trial, run, tmp_path, no_verdict, capsys):
    stops = [
        (teacher_answers, "label", 3),
        (Learner, "step", 7),
        (distill.Distillation, "_save", 1),
    ]
    calls = stopped_at_each(run, tmp_path / "draft", stops, capsys)
    assert same(weights(trial[0]), weights(tmp_path / "draft"))
    assert calls.count("step") == 7


@pytest.mark.slow
def test_answers_are_reused_and_a_draft_with_its_own_encoder_is_trained(
    trial, run, tmp_path, monkeypatch, no_verdict
):
    """The second run trains a draft with its own encoder on the first run's answers."""
    better = iter([1.0, 2.0])  # two steps cannot improve the bundled draft, so scores are faked
    monkeypatch.setattr(
        distill.Distillation, "_evaluate", lambda self: Evaluation(0.5, next(better))
    )
    shutil.copytree(trial[0].with_name("draft-work") / "answers", tmp_path / "own-work/answers")
    before = dict(tree_flatten(load(BUNDLED / "draft", "float32")[0].parameters()))
    moved = shutil.copytree(BUNDLED / "target", tmp_path / "moved", copy_function=shutil.copy)
    options = ["--model", str(moved), "--draft-model", str(BUNDLED / "draft")]
    monkeypatch.setattr(teacher_answers, "label", None)  # nothing is answered again
    assert run(tmp_path / "own", *options, "--iters", "2") == 0
    own, _ = load(tmp_path / "own", "float32")
    assert own.shares_with is None
    after = dict(tree_flatten(own.parameters()))
    assert after.keys() == before.keys() | {"d2t", "lm_head.weight"}
    before["lm_head.weight"] = before["shared.weight"][after["d2t"]]  # trained as a separate head
    encoder = "encoder.layers.0.self_attention.q.weight"
    for name in ("lm_head.weight", "shared.weight", encoder, "decoder.norm.weight"):
        assert not mx.array_equal(before[name], after[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_an_existing_draft_gets_a_new_vocabulary_without_training(
    trial, run, tmp_path, capsys, quantized
):
    """Only its head changes, and the verdict compares both drafts."""
    start, output = BUNDLED / "draft", tmp_path / "own"
    if quantized:
        options = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}
        start = convert(start, tmp_path / "quantized", "float32", **options)
    shutil.copytree(trial[0].with_name("draft-work") / "answers", tmp_path / "own-work/answers")
    flags = ["--draft-model", str(start), "--iters", "0", "--draft-vocab-size", "900"]
    assert run(output, *flags) == 0
    out, err = capsys.readouterr()
    assert "the draft proposes 900 of 3,072 tokens" in err and "memory" not in err
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert {str(output), str(start)} <= {row.split("|")[1].strip() for row in rows}
    assert len({row.count("|") for row in rows}) == 1
    before, after = weights(start), weights(output)
    ids = after.pop("d2t")
    assert len(ids) == 900 and 1 in ids.tolist()
    for name in [name for name in after if name.startswith("lm_head.")]:
        assert mx.array_equal(after.pop(name), before[name.replace("lm_head", "shared")][ids])
    if quantized:
        assert before.keys() == after.keys()
        assert all(mx.array_equal(after[name], before[name]) for name in after)


def test_unusable_answers_and_drafts_are_reported_and_left_out(run, tmp_path, monkeypatch, capsys):
    decode = SpeculativeDecoder.results

    def without_odd_ones(self, sources, *args, **settings):
        for source, result in zip(sources, decode(self, sources, *args, **settings), strict=True):
            yield replace(result, error="no memory") if len(source) % 2 else result

    monkeypatch.setattr(SpeculativeDecoder, "results", without_odd_ones)
    pair = replace(loading.choose_pair(None, None, None), draft=unlike(tmp_path / "other"))
    monkeypatch.setattr(loading, "choose_pair", lambda *_, **__: pair)
    options = ["--max-tokens", "3", "--iters", "1", "--decoder-layers", "2"]
    assert run(tmp_path / "draft", *options) == 0
    out, err = capsys.readouterr()
    failed = int(re.search(r"^(\d+) prompts had no answer and are left out", err, re.M)[1])
    match = re.search(r"^(\d+) of (\d+) answers had no end within --max-tokens 3 \(100%", err, re.M)
    assert match[1] == match[2] == str(55 - failed)
    assert re.search(r"^[1-5] held-out prompts could not be decoded and are left out", err, re.M)
    assert "other is not compared: vocabularies differ" in err
    assert "| lookup |" in out and "other" not in out


def unlike(folder: Path) -> Path:
    """Makes a draft whose vocabulary differs from the bundled target's."""
    shutil.copytree(BUNDLED / "draft", folder)
    for name in ("config.json", "generation_config.json"):
        entries = json.loads((folder / name).read_text()) | {"eos_token_id": 2}
        (folder / name).write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def models_given(tmp_path_factory) -> dict[str, str]:
    """Returns folders of unsuitable models, by their names in the options."""
    root = tmp_path_factory.mktemp("models")
    unlike(root / "other")
    convert(BUNDLED / "draft", root / "quantized", quantize=True, q_group_size=32)
    draft, _ = load(BUNDLED / "draft")
    narrow(draft, np.array([1, 5]))
    save_draft(draft, BUNDLED / "draft", root / "narrow")
    shutil.copytree(TARGET, root / "encoder")
    arrays = {n: a for n, a in weights(root / "encoder").items() if not n.startswith("decoder.")}
    mx.save_safetensors(str(root / "encoder" / "model.safetensors"), arrays, {"format": "pt"})
    names = {folder.name: str(folder) for folder in root.iterdir()}
    return names | {"draft": str(BUNDLED / "draft")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ("--draft-model {narrow}", "narrow has 2 tokens only; start from the model that it"),
        ("--model {narrow} --draft-model {other}", "this model writes 2 of 3072 tokens"),
        ("--decoder-layers 9", "a draft cannot have 9 decoder layers: the target has 3"),
        ("--data nowhere.txt", "there is no file nowhere.txt"),
        ("--data {few}", "the data has 3 different prompts that can be used; give 32"),
        ("--draft-model {other}", "vocabularies differ"),
        ("--output {copy}", "exists; choose another --output\n"),
        ("--output {blocked}", "blocked-work (File exists); choose another --output"),
        ("--draft-model=", "a model's name is empty"),
        ("--draft-model {quantized}", "is quantized, and such weights cannot be trained"),
        ("--model {encoder} --draft-model {other}", "encoder is an encoder alone"),
        ("--output {trial}", "has an earlier run; resume it with --resume"),
        ("--output {trial} --resume --temp 1", "was made with another --temp"),
        ("--output {trial} --resume --model {draft}", "with another --model"),
    ],
)
def test_bad_options_are_refused(request, run, tmp_path, capsys, models_given, options, message):
    (tmp_path / "few").write_text("one\ntwo\nthree\n")
    (tmp_path / "blocked-work").touch()
    if "{copy}" in options:
        shutil.copytree(BUNDLED / "draft", tmp_path / "copy")
    if "{trial}" in options:
        output, _ = request.getfixturevalue("trial")
        shutil.copytree(output.with_name("draft-work"), tmp_path / "trial-work")
    places = {n: str(tmp_path / n) for n in ("few", "blocked", "copy", "trial")}
    arguments = [word.format(**places, **models_given) for word in options.split()]
    check_refused(run, tmp_path / "new", arguments, message, capsys)
