"""Tests how the command line handles bad input and interruptions."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from command_line import ROOT, start
from mlx_t5.settings import UNREADABLE

BUNDLED = str(ROOT / "demo" / "target")

# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-draft", "0"], "--num-draft: .*--regular-decode"),
        (["--exact", "--delta", "0.5"], "delta is 0.5; exact decoding needs 0"),
        (["--exact", "--num-beams", "2"], "num_beams is 2; exact decoding has no beams"),
        (["--exact", "--embed"], "--exact is for texts"),
        (["--exact", "--num-draft", "32"], "num_draft is 32; exact decoding has room for 31"),
        (["--delta", "1.5"], "--delta: give a number from 0 .lossless. to 1"),
        (["--temp", "1e-40"], "--temp: give 0 .greedy., or a number from 1.2e-38"),
        (["-m", "0"], "-m/--max-tokens: give a whole number, at least 1, not .0.$"),
        (["--max-tokens", "9" * 5000], r"--max-tokens: .*not '9{50,60}…$"),
        (["--stop", ""], "stop is .*at least one character each"),
        (["--num-samples", "2"], "--num-samples: .*set --temp above 0"),
        (["--dtype", "int4"], "--dtype: .*bfloat16"),
        (["--no-such-option"], "--no-such-option; see --help"),
        (["--prompt", "a", "--input-file", "b"], "not allowed with"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--prompt", " \n"], "the prompt is empty"),
        (["--input-file", "none.txt"], "there is no file none.txt"),
        (["--output-file", "none/out.txt"], "there is no folder none"),
        (["--input-file", "in.txt", "--output-file", "in.txt"], "is the input file too"),
        (["--model", "models/none"], "there is no model folder models/none"),
        (["--model", "empty"], "config.json"),
        (["--model", "hollow"], "hollow"),
        (
            ["--model", BUNDLED, "--draft-model", "BYTES", "--dtype", "float32"],
            "vocabularies differ",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, models, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a\n")
    for name in ("empty", "hollow"):
        Path(name).mkdir()
    sizes = dict.fromkeys(("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"), 8)
    Path("hollow/config.json").write_text(json.dumps({"model_type": "t5", **sizes}))
    before = sorted(Path().rglob("*"))
    status, out, err = run(*(models[1] if word == "BYTES" else word for word in argv))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"error: .*{message}", err)
    assert sorted(Path().rglob("*")) == before, "nothing is written"


SPLIT = ["--split", "sentences", "--input-file", "in.txt"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--resume", "--output-file", "x.txt"], "give --input-file and --output-file"),
        (["--resume", "--embed", "--input-file", "x", "--output-file", "x.npy"], "with lines"),
        (["--resume", "--input-file", "-", "--output-file", "x"], "--resume of a pipe needs"),
        (["--score"], '--score: give --input-file, with {"prompt": "…", "target": "…"} on each'),
        (["--task", "x"], "--task puts its prefix before a prompt"),
        (["--normalize"], "--normalize is for the vectors of --embed"),
        (["--output-file", "x.npy"], "an array (.npy) is for the vectors of --embed"),
        ([*SPLIT, "--score"], "--score reads one prompt a line, not documents"),
        ([*SPLIT, "--embed"], "--embed reads one prompt a line, not documents"),
        (["--embed", "--input-file", "talk.srt"], "give --split none"),
        ([*SPLIT, "--num-samples", "2", "--temp", "1"], "leave --num-samples out"),
        (
            [*SPLIT, "--num-beams", "2", "--num-return-sequences", "2"],
            "leave --num-return-sequences out",
        ),
        ([*SPLIT, "--resume", "--output-file", "x"], "--resume is for lines"),
        *(
            (
                ["--split", "lines", "--input-file", f"a{suffix}"],
                f"--split cannot read {suffix} files",
            )
            for suffix in UNREADABLE
        ),
        (["--source-language", "de"], "--source-language is for documents"),
        (["--max-source-tokens", "9"], "--max-source-tokens is for documents"),
        ([*SPLIT, "--max-source-tokens", "0"], "--max-source-tokens: give a whole number, at"),
        (["--split", "words"], "--split: invalid choice"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(run, options, message):
    status, out, err = run(*options)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_a_bad_line_is_reported_and_other_lines_are_decoded(run, models, tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "good"}\n\n{"prompt": "too"}\n{"text": 1}\n')
    files = ["--input-file", str(source), "--output-file", str(results)]
    status, _, err = run(*models, "-m", "5", "--num-samples", "2", "--temp", "1", *files)
    assert status == 2
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    empty = f"error: {source} line 2 is empty; write what the model is to work on"
    assert errors[:2] == [empty] * 2
    assert errors[2].startswith(f"error: {source} line 4 has no prompt")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["good", "good", "", "", "too", "too", "", ""]
    assert [r["finish_reason"] == "error" for r in records] == [not r["prompt"] for r in records]


# ---- interruption --------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupting_a_text_keeps_it(models):
    process = start(*models, "-m", "100000", "--prompt", "x")
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).decode().endswith("\n")
    assert "interrupted: " in err.decode()
    assert "Traceback" not in err.decode()


@pytest.mark.slow
def test_interrupting_a_file_keeps_what_is_finished(models, tmp_path):
    source, results = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"{i}\n" for i in range(2000)))
    files = ["--input-file", str(source), "--output-file", str(results)]
    process = start(*models, "-m", "50", "--batch-size", "2", *files)
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err.decode()
    prompts = [json.loads(line)["prompt"] for line in results.read_text().splitlines()]
    assert prompts == [str(i) for i in range(len(prompts))]
    assert 0 < len(prompts) < 2000
    assert f"interrupted: {len(prompts)} of 2000 prompts done" in err.decode()


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(models):
    process = start(*models, "-m", "100000", "--prompt", "x")
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in err and "BrokenPipe" not in err
