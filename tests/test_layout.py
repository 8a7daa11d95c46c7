"""Tests the layout: files lie where they belong, and are short; variables are named by nouns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "mlx_t5"
REAL_FILES = {"main", "convert", "model", "decoder", "server", "benchmark", "distill", "finetune"}
# The limits are 350 lines a file and 40 a function without its docstring; these are longer.
FILE_LINES, FUNCTION_LINES = 350, 45
LONG_FILES = {"decoder.py"}
LONG_FUNCTIONS = {"convert.convert"}
NO_NOUNS = {*"asked each found given made others ours theirs told wanted".split()}
FOLDERS = (LIBRARY, "benchmarks", "demo", "tests")
FILES = [
    *ROOT.glob("*.py"),
    *(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/**/*.py")),
]


def test_the_root_has_only_the_listed_files():
    assert {file.stem for file in ROOT.glob("*.py")} <= REAL_FILES


def test_tests_lie_in_the_folders_of_what_they_test():
    folders = {folder.name for folder in (ROOT / LIBRARY).iterdir() if folder.is_dir()}
    tested = {file.parent.name for file in ROOT.glob("tests/*/test_*.py")}
    assert tested <= folders | {"benchmarks"}


def lines(node: ast.stmt) -> int:
    return node.end_lineno - node.lineno + 1


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Yields the name and the number of lines of each function, without its docstring."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = lines(node.body[0]) if ast.get_docstring(node) is not None else 0
            yield f"{file.stem}.{node.name}", lines(node) - docstring


def test_files_and_functions_are_short():
    for file in FILES:
        length, path = file.read_text("utf-8").count("\n"), file.relative_to(ROOT).as_posix()
        assert length <= FILE_LINES or path in LONG_FILES, f"{path} has {length} lines"
        for function, length in functions(file):
            short = length <= FUNCTION_LINES or function in LONG_FUNCTIONS
            assert short, f"{function} has {length} lines"


def test_variables_are_named_by_nouns():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if variable else node.arg if isinstance(node, ast.arg) else ""
            where = f"{file.relative_to(ROOT).as_posix()}:{getattr(node, 'lineno', 0)}"
            assert name not in NO_NOUNS, f"{where}: name {name} by what it is"
