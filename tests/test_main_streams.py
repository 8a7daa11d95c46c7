"""Tests pipes, closed streams and odd file names on the command lines."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import main
from command_line import ROOT, start
from mlx_t5.cli.input import Lines
from mlx_t5.cli.options import read_options
from mlx_t5.cli.resume import ResumePoint
from mlx_t5.cli.runs import MainJob, Run, lines_of
from mlx_t5.engine.codec import Job
from mlx_t5.engine.rows import Result, Stats
from mlx_t5.errors import UserError
from mlx_t5.loading import ModelPair
from mlx_t5.settings import Settings
from standard_error import messages, without_metal

PATIENCE = 120

# ---- pipes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def typing(*argv: str):
    """Yields the running command line, whose standard input stays open."""
    argv = [*argv, "-m", "5", "--json", "--input-file", "-"]
    with start(*argv, stdin=subprocess.PIPE, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen, prompt: str) -> None:
    """Writes one line and waits for its result."""
    process.stdin.write(prompt.encode() + b"\n")
    assert select.select([process.stdout], [], [], PATIENCE)[0], "nothing was decoded"
    assert json.loads(process.stdout.readline())["prompt"] == prompt


@pytest.mark.slow
@pytest.mark.parametrize("end", ["end of the input", "Ctrl-C"])
def test_each_line_is_answered_before_the_next_one_is_written(models, end):
    with typing(*models) as process:
        answer(process, "first")
        answer(process, "second")
        if end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            process.stdin.close()
        assert process.wait(PATIENCE) == (130 if end == "Ctrl-C" else 0)
        err = process.stderr.read().decode()
        assert ("interrupted: " in err) == (end == "Ctrl-C")
        assert "Traceback" not in err and "Fatal" not in err


@pytest.mark.parametrize(("opened", "hint"), [(os.openpty, True), (os.pipe, False)])
def test_a_terminal_is_told_how_to_end_the_input(opened, hint, monkeypatch, capsys):
    ends = opened()
    with os.fdopen(ends[hint]) as stdin:  # of a terminal, the second end
        monkeypatch.setattr(sys, "stdin", stdin)
        lines = lines_of("-", read_options(["--input-file", "-"]))
        os.close(ends[not hint])
        with pytest.raises(UserError):
            next(lines)  # nothing was written; the reading thread has ended
    assert ("Ctrl-D ends" in capsys.readouterr().err) == hint


def test_waiting_for_a_line_does_not_count_as_decoding(tmp_path, capsys):
    readable, writable = os.pipe()
    os.write(writable, b"prompt\n")
    os.close(writable)
    lines = Lines(f"/dev/fd/{readable}")

    def compute(prompts, *_):
        for _ in prompts:
            lines._prompts.waited += 1000  # as if the line had been typed slowly
            yield Result("text", [], [], "stop", Stats(generated_tokens=1))

    options = read_options(["--output-file", str(tmp_path / "out.txt")])
    job = MainJob(options, Job(Settings()), "", ModelPair(tmp_path, None, False, ""))
    run = Run(lines, ResumePoint(), job)
    assert main._write_all(run, compute, main._output(run, None, options), options) == 0
    os.close(readable)
    assert "1 tokens in -" in capsys.readouterr().err  # 1,000 seconds less than it took


# ---- many prompts --------------------------------------------------------------------------------


class Prompt(str):
    """A prompt that weak references can follow, to see whether it is freed."""


def test_neither_prompts_nor_results_are_kept(tmp_path):
    prompts, stats, most = [], [], 0

    def alive():
        return max(sum(ref() is not None for ref in refs) for refs in (prompts, stats))

    class FakeDecoder:
        tokenizer = None

        def results(self, prompts, job, *_):
            nonlocal most
            for _ in prompts:
                for _ in range(job.num_samples):
                    result = Result("text", [], [], "stop", Stats())
                    stats.append(weakref.ref(result.stats))
                    yield result
                    del result
                    most = max(most, alive())

    class Many(Lines):
        count = None

        def __init__(self):
            self._prompts = self._made()

        def _made(self):
            for i in range(300):
                prompt = Prompt(i)
                prompts.append(weakref.ref(prompt))
                yield prompt

    out = tmp_path / "out.txt"
    argv = ["--output-file", str(out), "--num-samples", "2", "--temp", "1"]
    options = read_options(argv)
    job = MainJob(options, Job(Settings(), num_samples=2), "", ModelPair(tmp_path, None, False, ""))
    run, compute = Run(Many(), ResumePoint(), job), main._computation(FakeDecoder(), job)
    assert main._write_all(run, compute, main._output(run, None, options), options) == 0
    assert out.read_text() == "text\n" * 600
    assert most <= 2


# ---- closed streams and odd names ----------------------------------------------------------------


def closed(redirections: str, *argv: str) -> subprocess.CompletedProcess:
    """Runs a command with streams closed or redirected by a shell."""
    command = ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirections", "command", "status", "lines", "error"),
    [
        (">&-", "main.py --prompt x", 2, 0, "standard output is closed; name an --output-file"),
        ("<&- >&- 2>&-", "main.py MODELS -m 5 --prompt x --output-file OUT", 0, 0, ""),
        ("2>&-", "main.py MODELS -m 5 --prompt x", 0, 1, ""),
        ("2>&-", "convert.py --model none", 2, 0, ""),
        ("<&-", "main.py --prompt -", 2, 0, "standard input is empty; write what the model is to "),
    ],
)
def test_closed_streams_are_handled(models, tmp_path, redirections, command, status, lines, error):
    """A closed standard input counts as empty, and output for a closed stream goes nowhere else."""
    out = tmp_path / "out.jsonl"
    command = command.replace("MODELS", shlex.join(models)).replace("OUT", str(out))
    done = closed(redirections, *shlex.split(command))
    assert (done.returncode, len(done.stdout.splitlines())) == (status, lines)
    stderr = without_metal(done.stderr.decode())
    assert stderr.startswith(f"error: {error}" if error else "") and bool(stderr) == bool(error)
    if str(out) in command:
        assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["x"]


def test_a_file_whose_name_is_no_unicode_can_be_named_in_errors(run, models, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    status, out, err = run("--input-file", name)
    assert (status, out) == (2, "")
    errors = {
        f"error: there is no file {tmp_path}/caf\\udce9.jsonl; check the path\n",
        f"error: cannot read {tmp_path}/caf\\udce9.jsonl: Illegal byte sequence\n",  # APFS
    }
    assert err in errors
    try:
        Path(name).write_text('{"prompt": "a"}\n{}\n')
    except OSError:
        pytest.skip("this file system takes Unicode only")
    results = str(tmp_path / "out.jsonl")
    for argv in (["--json"], ["--output-file", results]):
        status, out, err = run(*models, "-m", "5", "--input-file", name, *argv)
        assert status == 2
        assert "caf\\udce9.jsonl line 2 has no prompt" in err
        lines = (out or Path(results).read_text()).splitlines()
        assert json.loads(lines[1])["error"].startswith(f"{tmp_path}/caf\\udce9.jsonl line 2")


# ---- requirements --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "argv", "requirements"),
    [
        ("mlx", ["main.py"], "requirements.txt"),
        ("numpy", ["convert.py", "--model", "t5-small"], "requirements.txt"),
        ("mlx", ["benchmark.py", "compare"], "requirements.txt"),
        ("transformers", ["main.py"], "requirements.txt"),
        ("fastapi", ["server.py"], "requirements/server.txt"),
    ],
)
def test_a_missing_package_is_named_with_its_cure(package, argv, requirements):
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = {argv!r}\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    error = [f"error: {package} is not installed; pip install -r {requirements}"]
    assert [line for line in messages(done.stderr) if not line.startswith("target ")] == error
