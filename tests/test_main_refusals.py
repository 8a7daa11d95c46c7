"""Tests how the command line handles bad input and interruptions."""

import json
import os
import signal
import time

import pytest

from command_line import start


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
