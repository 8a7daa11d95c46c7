"""The pairs by which the bundled models are measured."""

import itertools
import json

from demo import corpus
from demo.recipe import heldout


def test_the_file_is_what_the_recipe_writes():
    with heldout.FILE.open(encoding="utf-8") as file:
        assert list(itertools.islice(file, 60)) == list(heldout.lines(30))


def test_the_file_has_both_tasks_and_nothing_of_the_training_text():
    records = [json.loads(line) for line in heldout.FILE.read_text(encoding="utf-8").splitlines()]
    assert [record["task"] for record in records] == ["translate", "fix"] * heldout.COUNT
    assert len({record["prompt"] for record in records}) == len(records)
    for record in records:
        prefix = corpus.TRANSLATE if record["task"] == "translate" else corpus.FIX
        assert record["prompt"].startswith(prefix)
        sentence = record["prompt"].removeprefix(prefix)
        assert corpus.is_held_out(sentence if record["task"] == "translate" else record["target"])
