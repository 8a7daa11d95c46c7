"""Tests distill.py from a file of prompts to a draft and its verdict, and resumed runs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import distill
from fake_hub import FakeApi
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.checkpoints.checkpoint import ENTRY
from mlx_t5.cli import distill_command as body
from mlx_t5.cli.distill_command import Distillation
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.model import load
from mlx_t5.training import evaluation, start, teacher_answers
from mlx_t5.training.evaluation import Acceptance
from mlx_t5.training.learner import Learner
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
            patch.setattr(evaluation, name, value)
        patch.setattr(teacher_answers, "SHARD", 16)
        patch.setattr(start, "ENOUGH", 0.8)  # these few answers have few tokens
        yield


@pytest.fixture
def no_verdict(monkeypatch):
    monkeypatch.setattr(Distillation, "_verdict", lambda self, path: "no verdict")


@pytest.fixture(scope="module")
def trial(run, tmp_path_factory):
    """Returns the output and the messages of a run without interruption."""
    output = tmp_path_factory.mktemp("trial") / "draft"
    with pytest.MonkeyPatch.context() as patch, heard() as (log, printed):
        patch.setattr("mlx_t5.cli.uploading.HfApi", FakeApi)
        assert run(output, "--upload-repo", "me/draft") == 0
    return output, "\n".join([*log, *printed])


@pytest.mark.slow
def test_a_few_steps_make_a_sharing_draft_and_a_verdict(trial):
    output, log = trial
    assert "left out: " in log and "line 61 is empty" in log and "line 63 is not UTF-8" in log
    scores = re.findall(r"step (\d+): .*acceptance ([\d.]+)%, ([\d.]+) tokens a call", log)
    assert [int(step) for step, *_ in scores] == [0, 7, 14]
    assert float(scores[-1][1]) > float(scores[0][1]) + 10 and float(scores[-1][2]) > 1.4
    assert f"| {output} | {scores[-1][1]}% | {scores[-1][2]} | " in log  # of as many proposals
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
    card = FakeApi.sent["me/draft"]["README.md"].decode()
    row = next(line for line in log.splitlines() if line.startswith(f"| {output} |"))
    assert row.replace(str(output), "me/draft") in card and "| lookup |" in card
    assert str(output) not in card and "demo/draft" not in card
    assert 'from_pretrained("target", draft="me/draft")' in card


@pytest.mark.slow
def test_a_run_stopped_anywhere_resumes_to_the_same_draft(trial, run, tmp_path, no_verdict, capsys):
    stops = [
        (teacher_answers, "label", 3),
        (Learner, "step", 7),
        (body, "save_draft", 1),
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
    monkeypatch.setattr(Distillation, "_evaluate", lambda *_: Acceptance(next(better), 1.5))
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
def test_a_quantized_draft_gets_a_new_vocabulary_without_training(trial, run, tmp_path, capsys):
    """Only its head changes, and the verdict compares both drafts."""
    options = {"quantize": True, "q_group_size": 32, "quant_predicate": "embed_8"}
    start = convert(BUNDLED / "draft", tmp_path / "quantized", "float32", **options)
    capsys.readouterr()  # what the conversion tells
    output = tmp_path / "own"
    shutil.copytree(trial[0].with_name("draft-work") / "answers", tmp_path / "own-work/answers")
    flags = ["--draft-model", str(start), "--iters", "0", "--draft-vocab-size", "900"]
    assert run(output, *flags) == 0
    out, err = capsys.readouterr()
    assert "the draft proposes 900 of 3,072 tokens" in err and "memory" not in err
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert {str(output), str(start)} <= {row.split("|")[1].strip() for row in rows}
    before, after = weights(start), weights(output)
    ids = after.pop("d2t")
    assert len(ids) == 900 and 1 in ids.tolist()
    for name in [name for name in after if name.startswith("lm_head.")]:
        assert mx.array_equal(after.pop(name), before[name.replace("lm_head", "shared")][ids])
    assert before.keys() == after.keys()
    assert all(mx.array_equal(after[name], before[name]) for name in after)


@pytest.mark.slow
@pytest.mark.parametrize("nan_at", [1, 2])
def test_after_a_nan_the_best_draft_is_written_if_there_is_one(
    run, tmp_path, monkeypatch, no_verdict, nan_at
):
    step, nan, values = Learner.step, (None, float("nan")), iter([0.1, 0.2])

    def stepped(self, state, batch):
        return nan if state.step + 1 == nan_at else step(self, state, batch)

    monkeypatch.setattr(Learner, "step", stepped)
    monkeypatch.setattr(Distillation, "_evaluate", lambda *_: Acceptance(next(values), 1.0))
    assert run(tmp_path / "draft", "--steps-per-eval", "1") == 1
    assert (tmp_path / "draft").exists() == (nan_at == 2)


def test_prompts_that_cannot_be_decoded_are_left_out(run, tmp_path, monkeypatch, capsys):
    decode = SpeculativeDecoder.results

    def without_odd_ones(self, sources, *args, **settings):
        for source, result in zip(sources, decode(self, sources, *args, **settings), strict=True):
            yield replace(result, error="no memory") if len(source.source) % 2 else result

    monkeypatch.setattr(SpeculativeDecoder, "results", without_odd_ones)
    options = ["--max-tokens", "3", "--iters", "1", "--decoder-layers", "2"]
    assert run(tmp_path / "draft", *options) == 0
    out, err = capsys.readouterr()
    failed = int(re.search(r"^(\d+) prompts had no answer and are left out", err, re.M)[1])
    match = re.search(r"^(\d+) of (\d+) answers had no end within --max-tokens 3 \(100%", err, re.M)
    assert match[1] == match[2] == str(55 - failed)
    assert re.search(r"^[1-5] held-out prompts could not be decoded and are left out", err, re.M)
    assert "| lookup |" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ("--decoder-layers 9", "a draft cannot have 9 decoder layers: the target has 3"),
        ("--data {few}", "the data has 3 different prompts that can be used; give 32"),
        ("--data {few}.tsv", "the data has 2 different prompts that can be used; give 32"),
        (
            "--data {pairs}.jsonl",
            "--data: of the completions' tokens the target itself would write",
        ),
        ("--draft-model {quantized}", "is quantized, and such weights cannot be trained"),
        ("--output {trial}", "has an earlier run; resume it with --resume"),
        ("--output {trial} --resume --temp 1", "was made with another --temp"),
    ],
)
def test_bad_options_are_refused(trial, run, tmp_path, capsys, options, message):
    (tmp_path / "few").write_text("one\ntwo\nthree\n")
    (tmp_path / "few.tsv").write_text("target\tsource\nun\tone\ndeux\ttwo\n")
    pairs = [{"prompt": f"fix grammar: I has {i} cat.", "completion": "no"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shutil.copytree(trial[0].with_name("draft-work"), tmp_path / "trial-work")
    if "{quantized}" in options:
        convert(BUNDLED / "draft", tmp_path / "quantized", quantize=True, q_group_size=32)
    places = {name: tmp_path / name for name in ("few", "pairs", "trial", "quantized")}
    check_refused(run, tmp_path / "new", options.format(**places).split(" "), message, capsys)
