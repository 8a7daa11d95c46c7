"""Tests the format of tables and files."""

import json
from dataclasses import dataclass

import pytest

from benchmarks import machine, printing
from mlx_t5.errors import UserError


def test_tables_say_whether_texts_are_equal():
    assert [printing.texts(n) for n in (0, 2, None)] == ["equal", "2 DIFFER", "sampled"]


def test_the_header_names_the_source_of_the_figures():
    facts = machine.environment("float32")
    head = printing.header(facts, "python benchmark.py compare", seed="x")
    assert head.startswith("python benchmark.py compare\n")
    for part in ("machine ", "cores ", "device ", "mlx ", "dtype float32", "seed x"):
        assert part in head


def test_json_keeps_dataclasses_and_its_path_is_checked_first(tmp_path):
    @dataclass
    class Point:
        x: int

    file = tmp_path / "figures.json"
    printing.write_record(file, {"a": [Point(1)], "b": "é"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": [{"x": 1}], "b": "é"}
    printing.write_record(None, {})
    with pytest.raises(TypeError, match="set"):
        printing.write_record(file, {"a": {1}})
    printing.check_writable(tmp_path / "new.json", None)
    with pytest.raises(UserError, match="there is no folder"):
        printing.check_writable(tmp_path / "nowhere" / "new.json")
