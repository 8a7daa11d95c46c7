"""The shape of the house: imports go down only, the root stays above, and nothing grows long.

python tests/test_layout.py    # prints the floors
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "mlx_t5"
REAL_FILES = {"main", "convert", "model", "decoder", "server", "benchmark", "distill", "finetune"}
# About 350 lines a file and 40 a function, its docstring aside; these are longer.
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
    """Modules of ours that a tree imports, but for type checkers alone."""
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


@cache
def floor(module: str) -> int:
    """How many imports lie below a module, along the longest way down."""
    return max((1 + floor(below) for below in imports(module)), default=0)


def of_the_library(module: str) -> bool:
    return module.split(".")[0] == LIBRARY


def test_imports_go_down_only():
    for module in MODULES:
        floor(module)  # a cycle has no end


def test_the_library_imports_no_file_of_the_root():
    for module in filter(of_the_library, MODULES):
        above = [below for below in imports(module) if not of_the_library(below)]
        assert not above, f"{module} imports {above}"


def test_no_two_folders_of_the_library_import_each_other():
    folder = lambda module: module.split(".")[1] if module.count(".") > 1 else ""  # noqa: E731
    pairs = {
        (folder(module), folder(below))
        for module in filter(of_the_library, MODULES)
        for below in filter(of_the_library, imports(module))
    }
    both = {(a, b) for a, b in pairs if a and b and a != b and (b, a) in pairs}
    assert not both


def test_there_are_few_floors():
    inside = {module: floor(module) for module in filter(of_the_library, MODULES)}
    assert max(inside.values()) < 10, sorted(inside.items(), key=lambda item: item[1])[-3:]
    above = {}
    for module in sorted(set(MODULES) - set(inside), key=floor):
        below = [above[m] for m in imports(module) if m in above]
        above[module] = 1 + max(below, default=0)
    assert max(above.values()) <= 6, sorted(above.items(), key=lambda item: item[1])[-3:]


def test_the_root_has_the_real_files_alone():
    assert {file.stem for file in ROOT.glob("*.py")} <= REAL_FILES


def test_tests_lie_in_the_folders_of_what_they_test():
    folders = {folder.name for folder in (ROOT / LIBRARY).iterdir() if folder.is_dir()}
    tested = {file.parent.name for file in ROOT.glob("tests/*/test_*.py")}
    assert tested <= folders | {"benchmarks"}


def lines(node: ast.stmt) -> int:
    return node.end_lineno - node.lineno + 1


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """How long each function of a file is without its docstring."""
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


if __name__ == "__main__":
    for module in sorted(MODULES, key=lambda m: (floor(m), m)):
        print(f"{floor(module):3}  {module}: {' '.join(sorted(imports(module)))}")
