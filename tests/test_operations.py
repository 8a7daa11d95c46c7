"""docs/backends.md lists all used operations of MLX, so each one is checked for GPUs."""

import ast
import re
from functools import reduce
from pathlib import Path

import main
from mlx_t5.backend import mx, nn

ROOT = Path(main.__file__).resolve().parent
FILES = [
    *(ROOT / f"{name}.py" for name in ("model", "decoder", "convert")),
    *ROOT.glob("mlx_t5/**/*.py"),
]
MODULES = {"mx": mx, "nn": nn}


def operations(code: str) -> set[str]:
    """Returns the functions of MLX in code, without types, constants and modules."""
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"(mx|nn)(\.\w+)+", ast.unparse(node))
    }
    return {name for name in names if is_function(name)}


def is_function(name: str) -> bool:
    module, *path = name.split(".")
    value = reduce(lambda thing, part: getattr(thing, part, None), path, MODULES[module])
    return callable(value) and not isinstance(value, type)


def test_operations_are_found_in_code():
    code = "x: mx.array = mx.fast.rms_norm(mx.zeros(2, mx.int32)).astype(mx.float32)\nf = nn.gelu"
    assert operations(code) == {"mx.fast.rms_norm", "mx.zeros", "nn.gelu"}


def test_the_table_lists_every_operation_and_no_other():
    used = set().union(*(operations(file.read_text(encoding="utf-8")) for file in FILES))
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    table = page.partition("| operations |")[2]
    listed = {
        name
        for row in table.splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`((?:mx|nn)\.[\w.]+)`", row.split(" | ")[0])
    }
    assert listed == used
