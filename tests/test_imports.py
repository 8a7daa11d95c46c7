"""The commands import no slow package before it is needed, and never torch."""

import re
import subprocess
import sys

import pytest

from serving_process import ROOT, Server

COMMANDS = {"main.py", "convert.py", "server.py", "benchmark.py", "distill.py", "finetune.py"}
SLOW = {"mlx", "numpy", "transformers", "torch", "huggingface_hub", "fastapi", "tqdm"}


def names(log: str) -> set[str]:
    """Returns the packages in the log of -X importtime."""
    return set(re.findall(r"^import time:.*\| *(\w+)", log, re.MULTILINE))


def imported(folder, *argv: str) -> set[str]:
    """Returns the packages that a command imports in a folder without models."""
    file, *rest = argv
    command = [sys.executable, "-X", "importtime", str(ROOT / file), *rest]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
    return names(done.stderr)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_older_python_is_refused_before_anything_is_imported(command):
    code = (
        "import runpy, sys, typing; del typing.TypeGuard; sys.version_info = (3, 9, 6)\n"
        f"runpy.run_path({command!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    error = "error: this needs Python 3.10 or later; make .venv with a newer one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


@pytest.mark.parametrize("command", sorted(COMMANDS - {"convert.py"}))
def test_help_imports_nothing_slow(tmp_path, command):
    found = imported(tmp_path, command, "--help")
    assert "argparse" in found and not found & SLOW


def test_help_of_convert_and_subcommands_does_not_import_transformers(tmp_path):
    for argv in (["convert.py", "--help"], ["benchmark.py", "peers", "--help"]):
        found = imported(tmp_path, *argv)
        assert "argparse" in found and not found & {"transformers", "torch", "huggingface_hub"}


@pytest.mark.slow
def test_a_subcommand_does_not_import_another():
    code = (
        "import sys, benchmark; status = benchmark.main(['peers', '--prompts', 'none'])\n"
        "print('\\n', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    modules = done.stdout.rpartition("\n ")[2].split()
    assert "benchmarks.peers" in modules and "benchmarks.compare" not in modules


@pytest.mark.slow
def test_the_server_serves_without_torch():
    running = Server(PYTHONPROFILEIMPORTTIME="1")
    try:
        ids = running.http.post("/v1/completions", json={"model": "demo", "prompt": "I eat."})
        assert ids.status_code == 200
        found = names(running.log)
    finally:
        running.close()
    assert {"mlx", "transformers", "fastapi"} <= found and "torch" not in found


@pytest.mark.slow
def test_torch_can_be_imported_after_a_tokenizer():
    """Torch is not imported but stays available, for users of transformers' models."""
    code = (
        "from mlx_t5.text import tokenizer; tokenizer.load_tokenizer('demo/target')\n"
        "import transformers; print(transformers.is_torch_available())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr
