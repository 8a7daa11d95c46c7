"""The recipe stands alone: whoever uses the project needs none of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[1]
ROOT = RECIPE.parents[1]


def imported(source: str) -> Iterator[str]:
    """Every module or name that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def outside() -> list[Path]:
    """The project's Python files outside the recipe."""
    folders = ("benchmarks", "mlx_t5", "tests")
    below = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return [*ROOT.glob("*.py"), *RECIPE.parent.glob("*.py"), *below]


@pytest.mark.parametrize("line", ["import demo.recipe.corpus", "from demo import recipe"])
def test_imports_are_found(line):
    assert any(name.startswith("demo.recipe") for name in imported(f"def f():\n    {line}"))


def test_nothing_else_imports_the_recipe():
    files = outside()
    assert len(files) > 50
    for file in files:
        names = imported(file.read_text(encoding="utf-8"))
        assert not any(name.startswith("demo.recipe") for name in names), file


def test_nothing_in_demo_changes_where_modules_are_looked_for():
    for file in RECIPE.parent.rglob("*.py"):
        if file != Path(__file__):
            assert "sys.path" not in file.read_text(encoding="utf-8"), file
