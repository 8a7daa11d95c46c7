"""What a run says about itself, and the form of its tables and files."""

import json
import os
from dataclasses import dataclass

import pytest

from benchmarks import report
from mlx_t5.errors import UserError


def test_a_table():
    columns = {"way": lambda row: row["way"], "n": lambda row: f"{row['n']:.1f}"}
    rows = [{"way": "a", "n": 1}, {"way": "b", "n": 2}]
    expected = "| way | n |\n| --- | --- |\n| a | 1.0 |\n| b | 2.0 |"
    assert report.markdown(columns, rows) == expected


def test_a_figure_that_is_unknown_or_cannot_be():
    assert [report.percent(share) for share in (None, 0.0, 0.625)] == ["", "0.0%", "62.5%"]
    assert [report.texts(n) for n in (0, 2, None)] == ["equal", "2 DIFFER", "sampled"]


def test_threads_are_what_the_blas_will_take():
    mkl, openblas = "MKL 2026.2, AVX2 kernels", "OpenBLAS 0.3.21, Haswell kernels"
    assert report.threads(mkl, {"OMP_NUM_THREADS": "300"}) <= os.cpu_count()
    assert report.threads(openblas, {"OMP_NUM_THREADS": "3"}) == 3
    assert report.threads(openblas, {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}) == 2
    assert 1 <= report.threads(openblas, {"OMP_NUM_THREADS": "many"}) <= os.cpu_count()


def test_the_header_says_where_figures_come_from():
    facts = report.environment("float32", ["pytest", "no-such-package"])
    head = report.header(facts, report.command(["compare", "--prompts", "my file"]), seed="x")
    assert head.startswith("python benchmark.py compare --prompts 'my file'\n")
    assert f"pytest {pytest.__version__}" in head and "no-such-package" not in head
    for part in ("machine ", "cores ", "device ", "mlx ", "dtype float32", "seed x"):
        assert part in head


def test_json_keeps_dataclasses(tmp_path):
    @dataclass
    class Point:
        x: int

    file = tmp_path / "figures.json"
    report.write_record(file, {"a": [Point(1)], "b": "é"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": [{"x": 1}], "b": "é"}
    report.write_record(None, {})
    with pytest.raises(TypeError, match="set"):
        report.write_record(file, {"a": {1}})


def test_a_file_that_cannot_be_written_is_seen_before_the_work(tmp_path):
    report.check_writable(tmp_path / "new.json", None)
    with pytest.raises(UserError, match="there is no folder"):
        report.check_writable(tmp_path / "nowhere" / "new.json")
