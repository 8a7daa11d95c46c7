"""Tests the example with Ray Data, if Ray is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

import snippets
from snippets import ROOT

HERE = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(not HERE, reason="Ray is not installed (requirements/ray.txt)")
def test_the_example_decodes_lines_in_order(tmp_path):
    page = snippets.read(ROOT / "docs" / "batches.md")
    (example,) = (s for s in page if s.code.startswith("import ray"))
    lines = ["fix grammar: She have two cat.", "translate English to French: I have two cats."]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    (tmp_path / "example.py").write_text(example.code.replace('"demo/', f'"{ROOT}/demo/'))
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == example.expected, done.stderr
