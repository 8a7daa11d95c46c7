"""Tests `--task`, generation_config.json and adapters on the command line."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import adapters
from command_line import ROOT
from convert import main as convert
from mlx_t5.checkpoints.generation_config import Preset, read_generation_config
from mlx_t5.cli import server_command
from mlx_t5.cli.server_options import read_server_options
from mlx_t5.loading import choose_pair
from mlx_t5.serving.service import Presets

TARGET = ROOT / "demo" / "target"
SENTENCE = "She have two cat."
TASKS = {
    "fixing": {"prefix": "fix grammar: ", "max_length": 4, "num_beams": 4, "num_beam_groups": 3},
    "french": {"prefix": "translate English to French: ", "do_sample": False},
}


@pytest.fixture
def wishing(tmp_path):
    """Returns a maker of options for the bundled target with tasks and a generation_config.json."""

    def make(**generation):
        folder = tmp_path / "target"
        shutil.copytree(TARGET, folder)
        for name, entries in (
            ("config.json", {"task_specific_params": TASKS, "n_positions": 512}),
            ("generation_config.json", generation),
        ):
            raw = json.loads((TARGET / name).read_text())
            (folder / name).write_text(json.dumps({**raw, **entries}))
        return ["--model", str(folder), "--dtype", "float32", "--draft-model", "none", "--json"]

    return make


def generated(run, *argv):
    status, out, err = run(*argv)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()], err


def test_a_task_gives_prefix_and_settings_and_options_override_them(run, wishing, tmp_path):
    model = wishing()
    (record,), err = generated(run, *model, "--task", "fixing", "--prompt", SENTENCE)
    assert record["prompt"] == SENTENCE
    assert (len(record["tokens"]), record["finish_reason"]) == (3, "length")
    assert "task fixing: left out, as not supported: num_beam_groups\n" in err
    (record,), _ = generated(run, *model, "--task", "fixing", "--prompt", SENTENCE, "-m", "50")
    assert record["text"] == "She has two cats."
    lines = tmp_path / "lines.txt"
    lines.write_text("I have two cats.\n\n")
    lines = ["--input-file", str(lines)]
    (record,), err = generated(run, *model, "--task", "french", *lines)
    assert record["text"] == "J'ai deux chats."
    assert "left out" not in err


def test_beams_in_the_models_files_do_not_switch_the_draft_off(run, wishing):
    draft = ["--draft-model", str(TARGET.parent / "draft"), "--num-draft", "5"]
    model = [*wishing(num_beams=2, length_penalty=2.0)[:-3], *draft, "--json", "--prompt", SENTENCE]
    (record,), err = generated(run, *model, "--task", "fixing")
    assert record["stats"]["drafted"] > 0
    assert err.count("ask for") == 1 and "ask for 4 beams; --num-beams 4 searches, without" in err
    (record,), err = generated(run, *model[:4], "--json", *model[-2:], "--num-beams", "2")
    assert record["score"] < 0 and "ask for" not in err


def test_a_task_gives_its_prefix_to_what_is_scored_or_embedded(run, wishing, tmp_path):
    """Targets get no prefix; the results show the prompts without it."""
    model, pairs = wishing()[:-1], tmp_path / "pairs.jsonl"
    pair = {"prompt": SENTENCE, "target": "She has two cats."}
    pairs.write_text(json.dumps(pair) + "\n")
    (scored,), err = generated(
        run, *model, "--task", "fixing", "--score", "--input-file", str(pairs)
    )
    assert {name: scored[name] for name in pair} == pair and scored["logprob"] > -1
    assert "left out" not in err, "settings are for generating"
    (vector,), _ = generated(run, *model, "--task", "fixing", "--embed", "--prompt", SENTENCE)
    (same,), _ = generated(run, *model, "--embed", "--prompt", "fix grammar: " + SENTENCE)
    assert vector["prompt"] == SENTENCE and vector["embedding"] == same["embedding"]


def test_generation_config_gives_defaults(run, wishing):
    model = wishing(max_new_tokens=2, do_sample=True, top_k=1)
    prompt = ["--prompt", f"fix grammar: {SENTENCE}"]
    for options, length in ([], 2), (["--max-tokens", "4"], 4), (["--ignore-generation-config"], 6):
        (record,), _ = generated(run, *model, *prompt, *options)
        assert len(record["tokens"]) == length
    samples, _ = generated(run, *model, *prompt, "--num-samples", "2")  # the file's default
    assert len(samples) == 2
    assert run(*model, *prompt, "--num-samples", "2", "--temp", "0")[0] == 2


def test_what_only_sampling_reads_is_named_if_nothing_is_sampled(run, wishing):
    model = [*wishing(top_k=1, top_p=0.5), "-m", "1", "--prompt", SENTENCE]
    note = "generation_config.json: without effect, as only sampling reads it: top_k, top_p\n"
    assert note in generated(run, *model)[1]
    assert note not in generated(run, *model, "--temp", "1")[1]
    general = read_generation_config(Path(model[1]))
    tasks = {"t": Preset("task t", unread=("min_p",))}
    of_task = note.replace("generation_config.json", "task t").replace("top_k, top_p", "min_p")
    assert [f"{one}\n" for one in Presets(general, tasks).notes] == [note, of_task]
    assert Presets(replace(general, settings={"temp": 1.0}), tasks).notes == []


def test_a_prompt_longer_than_n_positions_gets_one_note(run, wishing, monkeypatch):
    argv = [*wishing()[:-1], "-m", "1", "--prompt", "two cats " * 300]
    status, _, err = run(*argv, *argv[-2:])
    assert status == 0 and err.count("tokens, more than the model's n_positions (512)") == 1
    assert "encoding: " not in err
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)
    assert "encoding: " in run(*argv)[2]
    assert "n_positions" not in run(*argv[:-1], "two cats " * 90)[2]


def test_a_long_prompt_is_noted_without_n_positions_too(run, models):
    argv = [*models[:2], "--draft-model", "none", "-m", "1", "--prompt"]
    assert "note: a prompt has 2,701 tokens; encoding" in run(*argv, "two cats " * 300)[2]
    assert "note: " not in run(*argv, "two cats " * 200)[2]


def test_an_adapter_merged_at_load_or_conversion_writes_the_same_text(
    run, wishing, tmp_path, monkeypatch, capsys
):
    """Both write the same text, which differs from the text of the model alone."""
    model = wishing()
    layers = {f"decoder.block.{i}.layer.2.DenseReluDense.wo": (256, 1024) for i in range(3)}
    adapters.by_hand(
        tmp_path / "lora", layers, target_modules=["layer.2.DenseReluDense.wo"], lora_alpha=2
    )
    monkeypatch.chdir(tmp_path)
    prompt = ["--prompt", "fix grammar: They has cats.", "-m", "12"]
    (alone,), _ = generated(run, *model, *prompt)
    (merged,), err = generated(run, *model, *prompt, "--adapter-path", "lora")
    assert "with lora" in err
    assert convert(["--model", "target", "--dtype", "float32", "--adapter-path", "lora"]) == 0
    capsys.readouterr()
    (converted,), _ = generated(run, "--model", "target-lora", *model[2:], *prompt)
    assert alone["tokens"] != merged["tokens"] == converted["tokens"]
    record = json.loads(Path("models/target-lora/config.json").read_text())["converted_from"]
    assert record == {"folder": str(tmp_path / "target"), "adapter": "lora"}


@pytest.mark.parametrize("ignored", [False, True])
def test_the_server_reads_tasks_and_defaults(wishing, ignored):
    argv = [*wishing(max_new_tokens=2)[:-1], *["--ignore-generation-config"] * ignored]
    args = read_server_options(argv)
    service = server_command._application(args, choose_pair(args.model, "none")).state.service
    service.worker.stop()
    assert service.presets.general.settings == ({} if ignored else {"max_tokens": 2})
    assert list(service.presets.tasks) == ["fixing", "french"]
    left_out, beams = service.presets.notes
    assert left_out == "task fixing: left out, as not supported: num_beam_groups"
    assert beams.startswith("the model's files ask for 4 beams")
