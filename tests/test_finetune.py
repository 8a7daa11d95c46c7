"""Tests finetune.py from its options to its output folders, with the bundled target."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import distill
import finetune
from fake_hub import FakeApi
from mlx_t5.backend import mx, tree_flatten
from mlx_t5.cli.distill_command import Distillation
from mlx_t5.cli.finetune_command import FineTuning
from mlx_t5.convert import convert
from mlx_t5.model import load
from mlx_t5.training import examples, fine_tuning
from mlx_t5.training.learner import Learner
from mlx_t5.training.trainer import Trainer
from trainings import TARGET, check_refused, heard, same, shortest_prompts, stopped_at_each, weights

ADAPTER = "adapter_model.safetensors"
QUICK = "--iters 6 --batch-size 4 --steps-per-eval 3 --save-every 2 --max-seq-length 24 12"
QUICK += " --steps-per-report 2 --warmup-steps 1"
LORA = "--learning-rate 0.01 --lora-dropout 0.1 --target-modules q v wi --r 4".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Returns a file of short pairs and of lines that cannot be used."""
    prompts = shortest_prompts(30)
    pairs = [{"prompt": f"new {prompt}", "completion": "We eat bread."} for prompt in prompts]
    pairs += [pairs[0], {"prompt": "alone"}, {"prompt": "a", "completion": " "}]
    pairs += [{"prompt": "long " * 30, "completion": "a"}, {"prompt": "a", "completion": "b " * 30}]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)) + "\nno JSON\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(data):
    """Returns the command line for the bundled target and these pairs."""

    def command(output: Path, *more: str) -> int:
        options = ["--model", TARGET, "--data", str(data), "--output", str(output)]
        return finetune.main([*options, *QUICK.split(), *more])

    return command


@pytest.fixture(scope="module")
def trial(run, tmp_path_factory):
    """Returns the output, the log and the printed lines of a LoRA run without interruption."""
    output = tmp_path_factory.mktemp("trial") / "adapter"
    with heard() as (log, out):
        assert run(output, *LORA, "--metrics-file", str(output.parent / "m.jsonl")) == 0
    return output, "\n".join(log), out


def test_a_run_logs_its_progress_and_prints_the_next_commands(trial):
    output, log, out = trial
    assert "29 pairs to train on, 3 to evaluate by" in log and log.count("left out: ") == 4
    assert "1 prompts are cut to 24 tokens" in log and "1 pairs occur more than once" in log
    line = r"step (\d): .*held-out loss ([\d.]+), exact match [\d.]+%, chrF [\d.]+"
    steps, losses = zip(*re.findall(line, log), strict=True)
    assert steps == ("0", "3", "6") and float(losses[2]) < float(losses[0])
    metrics = [json.loads(line) for line in (output.parent / "m.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == [0, 2, 3, 4, 6, 6]
    assert [f"{m['eval_loss']:.4f}" for m in metrics if "eval_chrf" in m] == list(losses)
    assert [shlex.split(line)[1] for line in out] == ["main.py", "distill.py", "server.py"]
    prompts = Path(shlex.split(out[1])[shlex.split(out[1]).index("--data") + 1])
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert len(rows) == 29 and all(row.keys() == {"prompt"} for row in rows)


def test_the_adapter_has_its_configuration_and_weights(trial):
    output, _, _ = trial
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q", "v", "wi"] and config["r"] == 4
    assert config["lora_dropout"] == 0.1 and config["lora_alpha"] == 32
    assert config["base_model_name_or_path"] == TARGET
    assert len(weights(output, ADAPTER)) == 2 * (3 * 3 + 3 * 5)
    assert len(list(output.iterdir())) == 2


@pytest.mark.slow
def test_a_run_stopped_anywhere_resumes_to_the_same_adapter(trial, run, tmp_path, capsys):
    stops = [
        (FineTuning, "_evaluated", 1),
        (Learner, "step", 3),
        (Trainer, "_evaluate_if_due", 5),
        (fine_tuning, "save_adapter", 1),
    ]
    output = tmp_path / "adapter"
    stopped_at_each(lambda output, *more: run(output, *LORA, *more), output, stops, capsys)
    assert same(weights(trial[0], ADAPTER), weights(output, ADAPTER))


@pytest.mark.slow
def test_a_finished_run_is_extended(run, tmp_path):
    options = [*LORA, "--lr-scheduler-type", "constant", "--learning-rate", "0.003"]
    assert run(tmp_path / "whole", *options) == 0
    output = tmp_path / "adapter"
    assert run(output, *options, "--iters", "3") == 0
    assert run(output, *options, "--resume") == 0
    assert same(weights(tmp_path / "whole", ADAPTER), weights(output, ADAPTER))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("nan_at", [2, 5])
def test_after_a_nan_only_weights_better_than_the_models_own_are_written(
    run, tmp_path, monkeypatch, nan_at
):
    """The evaluation after step 3 is better, so from then on there are such weights."""
    step = Learner.step
    nan = (None, float("nan"))

    def stepped(self, state, batch):
        return nan if state.step + 1 == nan_at else step(self, state, batch)

    monkeypatch.setattr(Learner, "step", stepped)
    assert run(tmp_path / "adapter", *LORA) == 1
    assert (tmp_path / "adapter").exists() == (nan_at == 5)
    if nan_at == 5:
        arrays = weights(tmp_path / "adapter", ADAPTER)
        assert all(mx.any(a).item() for name, a in arrays.items() if "lora_B" in name)


def test_a_whole_model_is_trained_as_by_transformers_trainer(run, tmp_path, monkeypatch):
    learners = []
    monkeypatch.setattr(Trainer, "run", lambda trainer: learners.append(trainer.learner))
    folder = shutil.copytree(TARGET, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dropout_rate": 0.2}))
    options = f"--model {folder} --fine-tune-type full --weight-decay 0.1"
    assert run(tmp_path / "full", *options.split(" ")) == 1  # nothing was trained
    (learner,) = learners
    assert (learner.max_grad_norm, learner.weight_decay) == (1.0, 0.1)
    assert learner._drop == learner.model.drop and learner.model.config.dropout_rate == 0.2


@pytest.mark.slow
def test_an_adapter_of_a_quantized_folder_names_the_original_model_and_is_sent(
    run, tmp_path, monkeypatch, capsys
):
    """PEFT finds the model, and both write the same."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("mlx_t5.cli.uploading.HfApi", FakeApi)
    folder, output = convert(TARGET, tmp_path / "q8", quantize=True, q_bits=8), tmp_path / "adapter"
    options = ["--model", str(folder), *LORA, "--upload-repo", "me/adapter"]
    assert run(output, *options) == 0
    theirs = peft.AutoPeftModelForSeq2SeqLM.from_pretrained(output).eval().float()
    ids, written = [[20, 30, 40, 1]], [[0, 7]]
    logits = theirs(input_ids=torch.tensor(ids), decoder_input_ids=torch.tensor(written)).logits
    merged, _ = load(TARGET, "float32", adapter=output)
    ours = merged(mx.array(ids), mx.array(written))
    assert np.allclose(logits.detach().numpy(), np.array(ours), atol=1e-3)
    assert FakeApi.sent["me/adapter"].keys() == {"README.md", ADAPTER, "adapter_config.json"}
    card = FakeApi.sent["me/adapter"]["README.md"].decode()
    assert "library_name: peft" in card and "held-out loss" in card
    assert "mlx_t5.generate --model target --adapter-path adapter" in card


@pytest.mark.slow
def test_a_whole_model_is_trained_and_tested_with_a_test_file(data, run, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.loads(line) for line in data.read_text().splitlines()[:30]]
    tabs = "".join(f"{row['prompt']}\t{row['completion']}\n" for row in rows[:20])
    (folder / "train.tsv").write_text(tabs + "no pair\n")
    for name, part in (("validation", rows[20:24]), ("test", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = "--fine-tune-type full --num-layers 1 --lr-scheduler-type relative --warmup-steps 0"
    arguments = ["--data", str(folder), *options.split(), "--iters", "3"]
    assert run(tmp_path / "full", *arguments) == 0
    out, err = capsys.readouterr()
    assert "20 pairs to train on, 4 to evaluate by, 6 to test with" in err
    assert "left out" in err and "line 21 has 1 texts instead of 2" in err
    assert re.search("^test: held-out loss .*, exact match .*, chrF ", err, re.MULTILINE)
    assert out.count("--adapter-path") == 0 and out.count(str(tmp_path / "full")) >= 3
    before, after = (
        dict(tree_flatten(load(path, "float32")[0].parameters()))
        for path in (TARGET, tmp_path / "full")
    )
    changed = {name for name in before if not mx.allclose(before[name], after[name], rtol=1e-2)}
    assert changed and all(".layers.2." in name for name in changed)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--data {folder}/notes.md", "notes.md is no .jsonl, .csv or .tsv file"),
        ("--data {folder}", "has no train.jsonl, .csv or .tsv"),
        ("--max-seq-length 1", "0 pairs to train on, 0 to evaluate by; 10 and 1 are the least"),
        ("--output {trial}", "exists; extend its run with --resume and more --iters, or"),
        ("--output {begun} --resume --r 2", "was made with another --r (see"),
        ("--output {begun} --resume --data {folder}/ten.jsonl", "was made with another --data"),
    ],
)
def test_bad_options_are_refused(trial, data, run, tmp_path, capsys, options, message):
    (tmp_path / "notes.md").touch()
    (tmp_path / "ten.jsonl").write_text("".join(data.read_text().splitlines(keepends=True)[:20]))
    shutil.copytree(trial[0].with_name("adapter-work"), tmp_path / "begun-work")
    words = options.format(folder=tmp_path, trial=trial[0], begun=tmp_path / "begun").split(" ")
    check_refused(run, tmp_path / "new", [*LORA * ("{begun}" in options), *words], message, capsys)


@pytest.mark.slow
def test_an_adapted_model_gets_a_draft_without_a_merged_copy(trial, tmp_path, monkeypatch):
    """distill.py answers by the adapted model, and its draft names the base model."""
    targets = []
    monkeypatch.setattr(Distillation, "_verdict", lambda run, _: targets.append(run.target))
    monkeypatch.setattr(examples, "LEAST", 20)
    prompts, draft = trial[0].with_name("adapter-work") / "prompts.jsonl", tmp_path / "draft"
    options = ["--model", TARGET, "--adapter-path", str(trial[0]), "--data", str(prompts)]
    options += ["--output", str(draft), "--iters", "1", "--max-tokens", "3"]
    assert distill.main(options) == 0
    merged, _ = load(TARGET, adapter=trial[0])
    plain, _ = load(TARGET)
    weight, right, wrong = (
        m.decoder.layers[0].cross_attention.q.weight for m in (*targets, merged, plain)
    )
    assert mx.array_equal(weight, right) and not mx.array_equal(weight, wrong)
    assert load(draft, shared_with=merged)[0].shares_with is merged
