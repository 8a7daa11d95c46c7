"""Tests pipes, bad lines, interruptions, closed streams and odd file names on the command lines."""

import ast
import importlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from command_line import ROOT, start
from mlx_t5.cli.input import Line, LineReader, Lines
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine.rows import Result, Stats
from standard_error import messages, without_metal

PATIENCE = 120
GRAMMAR, FIXED = "fix grammar: She have two cat.", "She has two cats.\n"
BUNDLED = ["--model", str(ROOT / "demo/target"), "--dtype", "float32", "--num-draft", "5"]
LONG = [*BUNDLED, "-m", "100000", "--min-tokens", "100000", "--prompt", "x"]

# ---- pipes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_line_is_answered_before_the_next_one_is_written():
    argv = [*BUNDLED, "-m", "5", "--json", "--input-file", "-"]
    with start(*argv, stdin=subprocess.PIPE, bufsize=0) as process:
        for prompt in ("first", "second"):
            process.stdin.write(prompt.encode() + b"\n")
            assert select.select([process.stdout], [], [], PATIENCE)[0], "nothing was decoded"
            assert json.loads(process.stdout.readline())["prompt"] == prompt
        process.send_signal(signal.SIGINT)  # while it waits for a line
        assert process.wait(PATIENCE) == 130
        err = process.stderr.read().decode()
        assert "interrupted: " in err and "Traceback" not in err and "Fatal" not in err


def test_waiting_for_a_line_does_not_count_as_decoding(run, models, tmp_path, monkeypatch):
    waited = [0.0]

    def results(self, prompts, *_):
        for _ in prompts:
            waited[0] = 1000.0  # as if the line had been typed slowly
            yield Result("text", [], [], "stop", Stats(generated_tokens=1))

    monkeypatch.setattr(Lines, "waited", property(lambda lines: waited[0]))
    monkeypatch.setattr(SpeculativeDecoder, "results", results)
    (tmp_path / "in.txt").write_text("x")
    assert "1 tokens in 0.00 s" in run(*models, "--input-file", str(tmp_path / "in.txt"))[2]


@pytest.fixture
def stdin(monkeypatch):
    """Returns `stdin(data)`: makes a pipe standard input, which stays open if `data` is None."""
    files = []

    def give(data: str | None) -> None:
        reader, writer = os.pipe()
        files.append(open(reader))
        monkeypatch.setattr(sys, "stdin", files[0])
        if data is None:
            files.append(open(writer, "w"))
        else:
            os.write(writer, data.encode())
            os.close(writer)

    yield give
    for file in files:
        file.close()


def test_a_prompt_that_is_piped_in_needs_no_option(run, stdin, tmp_path, monkeypatch):
    stdin(GRAMMAR + "\n")
    status, out, err = run(*BUNDLED)
    assert (status, out) == (0, FIXED) and "prompt:" not in err
    (tmp_path / "in.txt").write_text(GRAMMAR.removeprefix("fix grammar: "))
    with open(tmp_path / "in.txt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(*BUNDLED, "--task", "grammar")[1] == FIXED
        file.seek(0)
        assert run(*BUNDLED, "--prompt", GRAMMAR)[1] == FIXED and file.buffer.tell() == 0
        assert run(*BUNDLED, "-m", "9")[0] == 0
        assert "\nprompt: translate" in run(*BUNDLED, "-m", "3")[2], "the file is at its end"


@pytest.mark.parametrize("data", ["", None])
def test_a_pipe_that_gives_nothing_is_not_waited_for(run, stdin, data):
    """A silent pipe that stays open would keep the test waiting for ever."""
    stdin(data)
    status, out, err = run(*BUNDLED, "-m", "3")
    assert status == 0 and out and "\nprompt: translate English to French: Let's" in err
    status, out, err = run(*BUNDLED, "--target-language", "fr")
    assert (status, out) == (2, "") and err.endswith("require --prompt or --input-file\n")
    assert run(*BUNDLED, "--prompt", GRAMMAR)[1] == FIXED


@pytest.mark.slow
def test_standard_input_is_left_to_a_loop_and_to_others(tmp_path):
    """Also /dev/null, a closed descriptor and a silent pipe of another process."""
    main = f"{shlex.quote(sys.executable)} main.py {shlex.join(BUNDLED)}"
    (tmp_path / "in.txt").write_text(f"{GRAMMAR}\n" * 2)
    shell = f'while read -r line; do {main} --prompt "$line"; done <{tmp_path}/in.txt'
    loop = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, timeout=PATIENCE)
    assert loop.stdout.decode() == 2 * FIXED
    for redirected in ("</dev/null", "<&-"):
        shell = ["sh", "-c", f"{main} -m 3 {redirected}"]
        done = subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0 and b"\nprompt: translate" in done.stderr
    with start(*BUNDLED, "-m", "3", stdin=subprocess.PIPE) as process:
        assert process.wait(PATIENCE) == 0 and b"\nprompt: translate" in process.stderr.read()


# ---- many prompts --------------------------------------------------------------------------------


def test_neither_prompts_nor_results_are_kept(run, models, tmp_path, monkeypatch):
    prompts, stats, most = [], [], 0

    def alive():
        return max(sum(ref() is not None for ref in refs) for refs in (prompts, stats))

    def results(self, given, request, *_):
        nonlocal most
        for _ in given:
            for _ in range(request.num_samples):
                result = Result("text", [], [], "stop", Stats())
                stats.append(weakref.ref(result.stats))
                yield result
                del result
                most = max(most, alive())

    def read(self):
        for i in range(300):
            line = Line(str(i), i)
            prompts.append(weakref.ref(line))
            yield line
            del line

    monkeypatch.setattr(SpeculativeDecoder, "results", results)
    monkeypatch.setattr(LineReader, "read", read)
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("x")
    argv = [*models, "--input-file", str(source), "--output-file", str(out), "--temp", "1"]
    assert run(*argv, "--num-samples", "2")[0] == 0
    assert out.read_text() == "text\n" * 600
    assert most <= 2


def test_a_bad_line_is_reported_and_other_lines_are_decoded(run, models, tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = '{"prompt": "good", "id": 7}\n\n{"id": {}, "prompt": "too"}\n{"text": 1, "id": [8]}\n'
    source.write_text(lines)
    files = ["--input-file", str(source), "--output-file", str(results)]
    status, _, err = run(*models, "-m", "5", "--num-samples", "2", "--temp", "1", *files)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2 and errors[:2] == [errors[0]] * 2
    assert errors[0].startswith(f"error: {source} line 2 is empty")
    assert errors[2].startswith(f"error: {source} line 4 has no prompt")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["good", "good", "", "", "too", "too", "", ""]
    assert [r["finish_reason"] == "error" for r in records] == [not r["prompt"] for r in records]
    assert [r.get("id") for r in records[::2]] == [7, None, {}, [8]], "fields that are not read"
    assert records[-1]["text"] is None, "a field of the output replaces one of the input"


# ---- interruption --------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c(monkeypatch):
    """Interrupts decoding after the first result, or the first piece of a document."""
    results, chunks = SpeculativeDecoder.results, SpeculativeDecoder.chunks

    def interrupted(method):
        def first(self, *args, **options):
            yield next(iter(method(self, *args, **options)))
            raise KeyboardInterrupt

        return first

    monkeypatch.setattr(SpeculativeDecoder, "results", interrupted(results))
    monkeypatch.setattr(SpeculativeDecoder, "chunks", interrupted(chunks))
    return monkeypatch


def resuming(err: str) -> list[str]:
    """The arguments of the command that an interrupted run prints last."""
    words = shlex.split(err.splitlines()[-1])
    assert words[:5] == ["go", "on", "with:", "python", "main.py"]
    return words[5:]


@pytest.mark.parametrize("name", ["out.txt", "out.jsonl"])
def test_ctrl_c_prints_the_command_that_resumes(run, tmp_path, ctrl_c, name):
    source, out = tmp_path / "the lines.txt", tmp_path / name
    source.write_text(f"{GRAMMAR}\n" * 3)
    argv = [*BUNDLED, "--input-file", str(source), "--output-file", str(out)]
    status, _, err = run(*argv)
    assert status == 130 and "interrupted: 1 of 3 prompts done" in err
    command, lines = resuming(err), out.read_text()
    assert command == [*argv, "--resume"]
    status, _, err = run(*argv)  # the same again
    assert (status, out.read_text()) == (2, lines) and err.count("\n") == 1
    assert err.startswith(f"error: {out} has 1 of 3 lines, from an interrupted run: --resume")
    assert resuming(run(*command)[2]) == command and len(out.read_text().splitlines()) == 2
    assert resuming(run(*argv, "--overwrite")[2]) == command
    assert len(out.read_text().splitlines()) == 1
    ctrl_c.undo()
    assert run(*command)[0] == 0 and len(out.read_text().splitlines()) == 3
    assert run(*argv)[0] == 0, "a complete output is replaced"


def test_ctrl_c_among_several_files_resumes_by_file(run, tmp_path, ctrl_c):
    for name in ("a.txt", "b.srt"):
        cue = "1\n00:00:01,000 --> 00:00:02,000\n"
        (tmp_path / name).write_text(
            f"{cue}She have two cat. I has a dog.\n" if "b" in name else "x"
        )
    out = tmp_path / "out"
    argv = [*BUNDLED, "--task", "grammar", "--input-file", str(tmp_path), "--output-file", str(out)]
    command = resuming(run(*argv)[2])
    assert os.listdir(out) == ["a.txt"]
    assert run(*argv)[0] == 2, "one result for two files"
    assert resuming(run(*command)[2]) == command and not (out / "b.srt").exists()
    ctrl_c.undo()
    assert run(*command)[0] == 0 and "She has two cats." in (out / "b.srt").read_text()


def test_a_pipe_s_output_is_replaced_and_text_from_it_cannot_be_resumed(
    run, tmp_path, stdin, ctrl_c
):
    stdin(f"{GRAMMAR}\n" * 3)
    (tmp_path / "out.txt").write_text("one\n")
    argv = [*BUNDLED, "--input-file", "-", "--output-file", str(tmp_path / "out.txt")]
    status, _, err = run(*argv)
    assert status == 130 and "go on with" not in err
    assert (tmp_path / "out.txt").read_text() == FIXED


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "the reader leaves"])
def test_an_interrupted_text_is_kept_and_a_reader_that_leaves_is_no_error(end):
    process = start(*LONG)
    first = os.read(process.stdout.fileno(), 1)
    if end == "Ctrl-C":
        process.send_signal(signal.SIGINT)
        assert (first + process.stdout.read()).decode().endswith("\n")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(PATIENCE) == (130 if end == "Ctrl-C" else 141)
    assert ("interrupted: " in err) == (end == "Ctrl-C")
    assert "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.slow
def test_interrupting_a_file_keeps_what_is_finished(tmp_path):
    source, results = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"{i}\n" for i in range(2000)))
    files = ["--input-file", str(source), "--output-file", str(results)]
    process = start(*BUNDLED, "-m", "50", "--min-tokens", "50", "--batch-size", "2", *files)
    deadline = time.monotonic() + 60
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err.decode()
    prompts = [json.loads(line)["prompt"] for line in results.read_text().splitlines()]
    assert prompts == [str(i) for i in range(len(prompts))] and 0 < len(prompts) < 2000
    assert f"interrupted: {len(prompts)} of 2000 prompts done" in err.decode()


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
        ("2>/dev/full", "main.py MODELS -m 5 --prompt x --prompt y -v", 0, 2, ""),
        ("2>&-", "convert.py --model none", 2, 0, ""),
        ("<&-", "main.py --prompt -", 2, 0, "standard input is empty; write what the model is to "),
    ],
)
def test_closed_streams_are_handled(tmp_path, redirections, command, status, lines, error):
    """A closed standard input counts as empty, and output for a closed stream goes nowhere else."""
    out = tmp_path / "out.jsonl"
    command = command.replace("MODELS", shlex.join(BUNDLED)).replace("OUT", str(out))
    done = closed(redirections, *shlex.split(command))
    assert (done.returncode, len(done.stdout.splitlines())) == (status, lines)
    stderr = without_metal(done.stderr.decode())
    assert stderr.startswith(f"error: {error}" if error else "") and bool(stderr) == bool(error)
    if str(out) in command:
        assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["x"]


def test_a_file_whose_name_is_no_unicode_can_be_named_in_errors(run, models, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    status, out, err = run("--input-file", name)
    assert (status, out) == (2, "") and f"{tmp_path}/caf\\udce9.jsonl" in err
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


# ---- the first half second -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["main", "convert", "distill", "finetune", "server"])
@pytest.mark.parametrize("module", ["mlx_t5.starting", "mlx_t5.cli.arguments"])
def test_ctrl_c_is_answered_in_one_line_while_modules_are_imported(
    command, module, tmp_path, monkeypatch, capsys
):
    """Before, Python printed where it was, or lost the Ctrl-C."""
    opened, load = [], importlib.import_module

    def interrupted(name):
        signal.raise_signal(signal.SIGINT)
        opened.append(name)
        return load(name)

    monkeypatch.setattr(f"{module}.import_module", interrupted)
    out = tmp_path / "out"
    argv = {"main": ["--prompt", "x"], "convert": ["--model", "x"], "server": ["--port", "0"]}
    needed = ["--model", "x", "--data", "x", "--output", str(out)]
    status = importlib.import_module(command).main(argv.get(command, needed))
    error = "interrupted; nothing was written\n"
    if module == "mlx_t5.cli.arguments":
        error = {"main": "interrupted\n", "server": ""}.get(command, error)
    assert (status, capsys.readouterr().err, len(opened)) == (130, error, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- requirements --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "argv", "requirements"),
    [
        ("mlx", ["main.py"], "requirements.txt"),
        ("numpy", ["convert.py", "--model", "t5-small"], "requirements.txt"),
        ("mlx", ["benchmark.py", "compare"], "requirements.txt"),
        ("tokenizers", ["main.py"], "requirements.txt"),
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


@pytest.mark.parametrize("name", ["decoder", "model", "mlx_t5.decoder"])
@pytest.mark.parametrize("old", [False, True])
def test_a_script_without_requirements_or_with_an_old_python_gets_one_line(name, old):
    code, error = f"import {name}", "error: mlx is not installed; pip install -r requirements.txt\n"
    if old:
        code = f"import sys, typing; sys.version_info = (3, 9, 6); del typing.TypeAlias; {code}"
        error = "error: this needs Python 3.10 or later; make .venv with a newer one\n"
    command = [sys.executable, "-S", "-c", code]  # -S: without any installed package
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


def test_what_an_old_python_reads_first_has_its_syntax():
    for name in ("decoder.py", "model.py", "convert.py", "main.py", "mlx_t5/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 9))
