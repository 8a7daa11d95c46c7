"""Options that several subcommands have."""

import argparse
import os

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


def test_the_header_shortens_paths_and_names_the_prompts():
    folder = os.path.join(os.getcwd(), "demo", "target")
    args = argparse.Namespace(model=folder, draft_model="t5-small", prompts=None)
    args.task, args.count = "mixed", 9
    models = {"target": os.path.join("demo", "target"), "draft": "t5-small"}
    assert options.header_fields(args) == {**models, "prompts": "9 of mixed"}
    args.task, args.repeats = ["fix", "translate", "fix"], 3
    assert options.header_fields(args) == {
        **models,
        "prompts": "9 of fix and translate",
        "repeats": 3,
    }
    args.prompts = "file"
    assert options.header_fields(args)["prompts"] == "9 of file"
