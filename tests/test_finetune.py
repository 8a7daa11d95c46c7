"""finetune.py from its options to the folders it writes, with the bundled target."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import distill
import finetune
from convert import convert
from decoder import SpeculativeDecoder
from mlx_t5.backend import mx, on_cpu, tree_flatten
from mlx_t5.cli.models import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.training import examples, fine_tuning, learner
from mlx_t5.training.answers import Answers
from mlx_t5.training.learner import Learner
from mlx_t5.training.trainer import Trainer
from model import load

QUICK = ["--iters", "6", "--batch-size", "4", "--steps-per-eval", "3", "--save-every", "2"]
QUICK += ["--max-seq-length", "24", "12", "--steps-per-report", "2", "--warmup-steps", "1"]
LORA = [
    "--learning-rate",
    "0.01",
    "--lora-dropout",
    "0.1",
    "--target-modules",
    "q",
    "v",
    "wi",
    "--r",
    "4",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Short pairs, and lines that cannot be used."""
    lines = (BUNDLED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: len(row["prompt"]))[:30]
    pairs = [{"prompt": f"new {row['prompt']}", "completion": "We eat bread."} for row in rows]
    pairs += [pairs[0], {"prompt": "alone"}, {"prompt": "a", "completion": " "}]
    pairs += [{"prompt": "long " * 30, "completion": "a"}, {"prompt": "a", "completion": "b " * 30}]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs)) + "\nno JSON\n", encoding="utf-8")
    return path


def run(data: Path, output: Path, *more: str) -> int:
    given = ["--data", str(data), "--output", str(output), *QUICK, *more]
    return finetune.main(["--model", str(BUNDLED / "target"), *given])


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """A run of LoRA that nothing has stopped: its output, what it logged and what it printed."""
    output = tmp_path_factory.mktemp("made") / "adapter"
    with pytest.MonkeyPatch.context() as patch:
        log: list[str] = []
        out: list[str] = []
        patch.setattr(finetune, "_log", log.append)
        patch.setattr("builtins.print", lambda *a, **_: out.append(str(a[0])))
        assert run(data, output, *LORA) == 0
    return output, "\n".join(log), out


def weights(folder: Path, name: str = "adapter_model.safetensors") -> dict[str, mx.array]:
    return mx.load(str(folder / name))


def test_it_says_what_it_does_and_what_comes_next(made, data):
    output, log, out = made
    assert "27 pairs to train on, 3 to evaluate by" in log
    for reason in (
        "line 32 has no completion",
        "line 33 has a completion that is empty",
        "its prompt has 31 tokens, and --max-seq-length is 24",
        "its completion has 31 tokens, and --max-seq-length is 12",
        "line 36 is not JSON",
    ):
        assert len(re.findall(f"^left out: .*{reason}", log, re.MULTILINE)) == 1, reason
    assert re.search(r"memory: at most [\d.]+ .B of .*\(model [\d.]+ MB, what is trained", log)
    assert re.search(r"step 2 of 6: loss [\d.]+, [\d,]+ tokens/s, [\d.]+ min left", log)
    scores = re.findall(r"step (\d): .*exact match [\d.]+%, chrF [\d.]+", log)
    assert scores == ["0", "3", "6"]
    assert log.count("    → ") == 9 and "(the best so far)" in log
    assert re.search(r"trained for \d+ s, [\d.]+ .B of memory at most; the best weights", log)
    programs = [shlex.split(line)[1] for line in out]
    assert programs == ["main.py", "distill.py", "server.py"]
    prompts = Path(shlex.split(out[1])[shlex.split(out[1]).index("--data") + 1])
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert len(rows) == 27 and all(row.keys() == {"prompt"} for row in rows)
    assert {file.name for file in prompts.parent.iterdir()} == {"run.json", "prompts.jsonl"}


def test_the_adapter_says_what_it_is(made):
    output, _, _ = made
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q", "v", "wi"] and config["r"] == 4
    assert config["lora_dropout"] == 0.1 and config["lora_alpha"] == 32
    assert config["base_model_name_or_path"] == str(BUNDLED / "target")
    arrays = weights(output)
    assert len(arrays) == 2 * (3 * 3 + 3 * 5) and len(list(output.iterdir())) == 2
    merged, _ = load(BUNDLED / "target", "float32", adapter=output)
    plain, _ = load(BUNDLED / "target", "float32")
    layers = [model.decoder.layers[2].cross_attention for model in (plain, merged)]
    assert not mx.array_equal(*(layer.q.weight for layer in layers))
    assert mx.array_equal(*(layer.o.weight for layer in layers))


@pytest.mark.slow
def test_stopped_anywhere_it_comes_to_the_same_adapter(made, data, tmp_path, monkeypatch, capsys):
    output, more, calls = tmp_path / "adapter", (), []

    def stopping(name, function, at):
        def called(*args, **kwargs):
            calls.append(name)
            if calls.count(name) == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return called

    for owner, name, at in (
        (finetune.FineTuning, "_evaluated", 1),
        (Learner, "step", 3),
        (Trainer, "_evaluate_if_due", 5),
        (fine_tuning, "save_adapter", 1),
    ):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, stopping(name, function, at))
        assert run(data, output, *LORA, *more) == 130
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("interrupted; go on with: python finetune.py --model ")
        assert line.endswith(" --resume") and line.count("--resume") == 1
        monkeypatch.setattr(owner, name, function)
        more = ("--resume",)
    assert run(data, output, *LORA, "--resume") == 0
    one, other = weights(made[0]), weights(output)
    close = mx.array_equal if on_cpu() else lambda a, b: mx.allclose(a, b, atol=1e-2)
    assert one.keys() == other.keys() and all(close(one[n], other[n]) for n in one)


def test_a_loss_that_is_no_number_leaves_the_best_weights(data, tmp_path, monkeypatch, capsys):
    taken = Learner.step
    monkeypatch.setattr(
        Learner, "step", lambda s, a, b: (None, 0.0) if a.step == 4 else taken(s, a, b)
    )
    assert run(data, tmp_path / "adapter", *LORA) == 0
    err = capsys.readouterr().err
    assert "step 5: the loss or its gradient is no number; stopped. The best so far is kept" in err
    assert len(weights(tmp_path / "adapter")) == 48


@pytest.mark.slow
def test_a_whole_model_and_a_test_file(data, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.loads(line) for line in data.read_text().splitlines()[:30]]
    tabs = "".join(f"{row['prompt']}\t{row['completion']}\n" for row in rows[:20])
    (folder / "train.tsv").write_text(tabs + "no pair\n")
    for name, part in (("validation", rows[20:24]), ("test", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = ["--fine-tune-type", "full", "--num-layers", "1", "--lr-scheduler-type", "relative"]
    options += ["--warmup-steps", "0", "--iters", "3"]
    assert run(folder, tmp_path / "full", *options) == 0
    out, err = capsys.readouterr()
    assert "20 pairs to train on, 4 to evaluate by, 6 to test with" in err
    assert "left out" in err and "line 21 is no pair" in err
    assert re.search("^test: exact match .*, chrF ", err, re.MULTILINE)
    assert out.count("--adapter-path") == 0 and out.count(str(tmp_path / "full")) >= 3
    before, after = (
        dict(tree_flatten(load(path, "float32")[0].parameters()))
        for path in (BUNDLED / "target", tmp_path / "full")
    )
    changed = {name for name in before if not mx.allclose(before[name], after[name], rtol=1e-2)}
    assert changed and all(".layers.2." in name for name in changed)


@pytest.mark.slow
def test_a_quantised_model_gets_dora(data, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "cpu_only", lambda: True)  # a rehearsal would compile a minute
    folder = convert(BUNDLED / "target", tmp_path / "q4", quantize=True)
    options = ["--model", str(folder), "--fine-tune-type", "dora", "--grad-checkpoint"]
    assert run(data, tmp_path / "dora", *options, "--iters", "1", "--num-layers", "1") == 0
    assert "lora_magnitude_vector" in " ".join(weights(tmp_path / "dora"))
    model, tokenizer = load(folder, adapter=tmp_path / "dora")
    result = SpeculativeDecoder(model, None, tokenizer).generate("fix grammar: I is.", max_tokens=5)
    assert result.tokens


@pytest.mark.parametrize(
    "options, message",
    [
        (["--data", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--data", "README.md"], "README.md is no .jsonl and no .tsv file"),
        (["--data", "{empty}"], "empty.jsonl is empty"),
        (["--data", "{folder}"], "has no train.jsonl and no train.tsv"),
        (["--data", "{few}"], "the data has 2 pairs that can be used; 10 are the least to train"),
        (["--valid", "{empty}"], "empty.jsonl is empty"),
        (["--max-seq-length", "1", "2", "3"], "takes one number, or two"),
        (["--max-seq-length", "1"], "the data has 0 pairs that can be used"),
        (["--target-modules", "lm_head"], "names no layer of attention or feed-forward"),
        (["--num-layers", "0"], "--num-layers 0 trains nothing"),
        (["--lr-scheduler-type", "relative", "--learning-rate", "1"], "has a rate of its own"),
        (["--lr-scheduler-type", "relative", "--optimizer", "adamw"], "is adafactor's"),
        (["--learning-rate", "0"], "give a number from 1e-8 to 1, not '0'"),
        (["--lora-dropout", "1"], "give a number from 0 to 0.9, not '1'"),
        (["--output", "{made}"], "exists; choose another --output or remove it"),
        (["--output", "{made}", "--resume"], "exists: the adapter is complete. Use it"),
        (["--output", "{made}2"], "has an earlier run; go on with --resume"),
        (["--output", "{made}2", "--resume", "--seed", "1"], "was made with another --seed"),
        (["--output", ""], "--output is empty; name a folder"),
        (["--model", "{quantised}", "--fine-tune-type", "full"], "is quantised, and such weights"),
    ],
)
def test_refusals(made, data, tmp_path, capsys, options, message):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    lines = data.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:3]))
    places = {name: str(tmp_path / name) for name in ("folder", "made", "quantised")}
    places |= {name: str(tmp_path / f"{name}.jsonl") for name in ("empty", "few")}
    if "{quantised}" in options:
        convert(BUNDLED / "target", tmp_path / "quantised", quantize=True)
    if "{made}" in options:
        shutil.copytree(made[0], tmp_path / "made")
    if "{made}2" in options:
        shutil.copytree(made[0].with_name("adapter-work"), tmp_path / "made2-work")
    given = [option.format(**places) for option in options]
    try:
        status = run(data, tmp_path / "new", *given)
    except SystemExit as error:
        status = error.code
    err = capsys.readouterr().err
    assert status == 2 and message in err and err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "new").exists() and not (tmp_path / "new-work").exists()


@pytest.mark.slow
def test_an_adapted_model_gets_a_draft_without_a_merged_copy(made, tmp_path, monkeypatch, capsys):
    """distill.py answers as adapted, and the draft works with the adapter and not without it."""
    answered = []
    complete = Answers.complete
    monkeypatch.setattr(
        Answers, "complete", lambda a, t, *more: (answered.append(t), complete(a, t, *more))
    )
    monkeypatch.setattr(distill.Distillation, "_verdict", lambda self, path: "no verdict")
    monkeypatch.setattr(examples, "LEAST", 20)
    prompts, draft = made[0].with_name("adapter-work") / "prompts.jsonl", tmp_path / "draft"
    given = ["--model", str(BUNDLED / "target"), "--data", str(prompts), "--output", str(draft)]
    given += ["--iters", "1", "--max-tokens", "3"]
    assert distill.main([*given, "--adapter-path", str(made[0])]) == 0
    merged, _ = load(BUNDLED / "target", "float32", adapter=made[0])
    plain, _ = load(BUNDLED / "target", "float32")
    ours, same, other = (
        m.decoder.layers[0].cross_attention.q.weight for m in (answered[0], merged, plain)
    )
    assert mx.array_equal(ours, same) and not mx.array_equal(ours, other)
    assert load(draft, shared_with=merged)[0].shares_with is merged
    with pytest.raises(UserError, match="and the target is another model"):
        load(draft, shared_with=plain)
    shutil.rmtree(draft)
    assert distill.main([*given, "--resume"]) == 2
    assert "was made with another --adapter-path" in capsys.readouterr().err
    assert distill.main([*given, "--adapter-path", str(made[0]), "--upload-repo", "a/b"]) == 2
    assert "leave --upload-repo out" in capsys.readouterr().err
