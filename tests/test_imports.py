"""Tests imports: they go down only, and the commands import nothing slow before it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from serving_process import ROOT

LIBRARY = "mlx_t5"
# Imports go down only: a room may import itself and the rooms before it. Types of later rooms are
# imported under TYPE_CHECKING.
FLOORS = """
errors installation starting | backend timing disk | settings
text | checkpoints | sampling | network | model
drafting scoring | engine loading | decoder
training | serving | cli
generate convert server distill finetune | benchmarks | benchmark | __main__ main demo
"""
ROOMS = [floor.split() for floor in FLOORS.strip().replace("\n", "|").split("|")]
FLOOR = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
COMMANDS = {"main.py", "convert.py", "server.py", "benchmark.py", "distill.py", "finetune.py"}
SLOW = {"mlx", "numpy", "transformers", "torch", "huggingface_hub", "fastapi", "tqdm"}


def name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [*ROOT.glob("*.py"), *ROOT.glob(f"{LIBRARY}/**/*.py")]
MODULES = {name(file): file for file in FILES}
DOORS = {f"{LIBRARY}.{module}": module for module in ("model", "decoder")}


def imported_by(tree: ast.AST) -> set[str]:
    """Returns the project's modules that a tree imports, except under TYPE_CHECKING."""
    modules = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {path if path in MODULES else node.module for path in full}
        modules |= imported_by(node)
    return modules & MODULES.keys()


@cache
def imports(module: str) -> frozenset[str]:
    if module in DOORS:
        return frozenset({DOORS[module]})
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    return frozenset(imported_by(tree) - {module})


def room(module: str) -> str:
    """Returns the folder or file of a module, as "engine" for `mlx_t5.engine.rows`."""
    first, *tail = module.split(".")
    return tail[0] if first == LIBRARY and tail else first


def test_imports_go_down_only():
    up = [
        f"{module} imports {below}"
        for module in sorted(MODULES.keys() - {LIBRARY})
        for below in imports(module) - {LIBRARY}
        if room(module) != room(below) and FLOOR[room(module)] <= FLOOR[room(below)]
    ]
    assert not up


def test_no_two_modules_import_each_other():
    @cache
    def depth(module: str) -> int:
        return max((1 + depth(below) for below in imports(module)), default=0)

    for module in MODULES:
        depth(module)  # a cycle raises a RecursionError


def names(log: str) -> set[str]:
    """Returns the packages and modules in the log of -X importtime."""
    pairs = re.findall(r"^import time:.*\| *((\w+)[\w.]*)", log, re.MULTILINE)
    return set(chain.from_iterable(pairs))


def imported(folder, *argv: str) -> set[str]:
    """Returns the packages and modules that a command imports in a folder without models."""
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


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_nothing_slow(tmp_path, command):
    modules = imported(tmp_path, command, "--help")
    assert "argparse" in modules and not modules & SLOW


def test_help_of_subcommands_does_not_import_transformers(tmp_path):
    modules = imported(tmp_path, "benchmark.py", "peers", "--help")
    assert "argparse" in modules and not modules & {"transformers", "torch", "huggingface_hub"}


def test_a_prompt_imports_what_its_answer_needs(tmp_path):
    """The bundled pair's tokenizer needs tokenizers and sentencepiece, and nothing else is slow."""
    modules = imported(tmp_path, "main.py", "--prompt", "fix grammar: She have two cat.")
    libraries = {"mlx", "numpy", "tokenizers", "sentencepiece", "tqdm"}
    assert not {"mlx_t5.text.documents", "mlx_t5.text.subtitles"} & modules
    unneeded = SLOW | {"babel", "sentencex", "pydantic", "google", "peft", "requests", "httpx"}
    assert libraries <= modules and not modules & (unneeded - libraries)


def test_a_server_begins_to_load_its_models_before_its_web_framework_is_imported():
    code = """
import sys
from mlx_t5.cli.server_options import main
from mlx_t5.serving.worker import Worker
def load(worker):
    print("loading after", {"fastapi", "uvicorn"} & {*sys.modules})
    sys.exit()
Worker.load = load
main(["--port", "0"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "loading after set()\n"), done.stderr


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
