"""Options that several subcommands have."""

import argparse
import os
from types import SimpleNamespace

import pytest

from benchmarks import options


def test_numbers():
    assert options.at_least(2)("2") == 2
    assert options.between(0, 1)("0.5") == 0.5
    assert [options.num_draft(text) for text in ("3", "auto")] == [3, "auto"]
    for kind, text in [
        (options.at_least(2), "1"),
        (options.at_least(2), "2.5"),
        (options.between(0, 1), "1.1"),
        (options.between(0, 1), "nan"),
        (options.between(0, 1), "x"),
        (options.num_draft, "0"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=f"give a .*, not '{text}'"):
            kind(text)


def test_the_header_shortens_paths_and_names_the_seed_of_held_out_prompts():
    folder = os.path.join(os.getcwd(), "demo", "target")
    args = SimpleNamespace(model=folder, draft_model="t5-small", prompts=None, seed="x")
    target = os.path.join("demo", "target")
    assert options.of_pair(args) == {"target": target, "draft": "t5-small", "seed": "x"}
    args.prompts = "file"
    assert options.of_pair(args) == {"target": target, "draft": "t5-small"}
