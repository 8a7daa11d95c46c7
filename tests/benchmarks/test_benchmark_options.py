"""Options that several subcommands have."""

import argparse
import os

from benchmarks import options


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
