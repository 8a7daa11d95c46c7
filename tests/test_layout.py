"""Tests the layout of the code: imports go down only, and files and functions are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "mlx_t5"
REAL_FILES = {"main", "convert", "model", "decoder", "server", "benchmark", "distill", "finetune"}
# Imports go down only: a room may import itself and the rooms before it. Types of later rooms are
# imported under TYPE_CHECKING.
FLOORS = """
errors sizes | ranges blas cuda | backend timing disk grouping | settings
checkpoints | text | sampling | network | names | model
drafting scoring | engine loading | decoder
machines | training | cli | serving
convert | demo | benchmarks | main server distill finetune benchmark
"""
ROOMS = [floor.split() for floor in FLOORS.strip().replace("\n", "|").split("|")]
FLOOR = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
# The limits are 350 lines a file and 40 a function without its docstring; these are longer.
FILE_LINES, FUNCTION_LINES = 350, 45
LONG_FILES = {"decoder.py"}
LONG_FUNCTIONS = {"convert.convert"}


def name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [*ROOT.glob("*.py"), *ROOT.glob(f"{LIBRARY}/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
MODULES = {name(file): file for file in FILES}
ALL_FILES = [*FILES, *ROOT.glob("demo/**/*.py"), *ROOT.glob("tests/**/*.py")]


def imported(tree: ast.AST) -> set[str]:
    """Returns the project's modules that a tree imports, except under TYPE_CHECKING."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else node.module for each in full}
        found |= imported(node)
    return found & MODULES.keys()


@cache
def imports(module: str) -> frozenset[str]:
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    return frozenset(imported(tree) - {module})


def room(module: str) -> str:
    """Returns the folder or file of a module, as "engine" for `mlx_t5.engine.rows`."""
    first, *others = module.split(".")
    return others[0] if first == LIBRARY and others else first


def test_imports_go_down_only():
    up = [
        f"{module} imports {below}"
        for module in sorted(MODULES.keys() - {LIBRARY})
        for below in imports(module) - {LIBRARY}
        if room(module) != room(below) and FLOOR[room(module)] <= FLOOR[room(below)]
    ]
    assert not up


def test_the_page_about_the_code_has_these_floors():
    page = (ROOT / "docs" / "how-it-is-built.md").read_text("utf-8")
    places = [page.find(f"\n    {floor}  ") for floor in FLOORS.strip().splitlines()]
    assert -1 not in places and places == sorted(places, reverse=True)


def test_no_two_modules_import_each_other():
    @cache
    def depth(module: str) -> int:
        return max((1 + depth(below) for below in imports(module)), default=0)

    for module in MODULES:
        depth(module)  # a cycle raises a RecursionError


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
            yield f"{name(file)}.{node.name}", lines(node) - docstring


def test_files_and_functions_are_short():
    for file in ALL_FILES:
        length, path = file.read_text("utf-8").count("\n"), file.relative_to(ROOT).as_posix()
        assert length <= FILE_LINES or path in LONG_FILES, f"{path} has {length} lines"
        for function, length in functions(file):
            short = length <= FUNCTION_LINES or function in LONG_FUNCTIONS
            assert short, f"{function} has {length} lines"
