"""Which prompts are measured."""

import json

import pytest

from backend import UserError
from benchmarks import workload
from demo import corpus


def test_held_out_prompts_have_their_one_right_answer():
    prompts = workload.held_out("fix", 5, "x")
    assert prompts.sets == ["fix"] * 5 and prompts.name == "fix"
    assert all(prompt.startswith(corpus.FIX) for prompt in prompts.prompts)
    assert all(corpus.is_held_out(answer) for answer in prompts.references)


def test_mixed_prompts_are_those_of_both_sets_shuffled():
    mixed = workload.held_out("mixed", 9, "x")
    parts = workload.held_out("translate", 5, "x"), workload.held_out("fix", 4, "x")
    answers = {p: r for part in parts for p, r in zip(part.prompts, part.references, strict=True)}
    assert dict(zip(mixed.prompts, mixed.references, strict=True)) == answers
    assert mixed.prompts != list(answers)
    for part in parts:
        assert {mixed.prompts[place] for place in mixed.of(part.name)} == set(part.prompts)


def test_a_file_of_lines_and_one_with_references(tmp_path):
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text("one\ntwo\nthree\n")
    read = workload.from_file(str(lines), 2)
    assert (read.name, read.prompts, read.references) == ("lines.txt", ["one", "two"], None)
    assert read.of("lines.txt") == [0, 1]
    records = [{"prompt": "one", "reference": "un"}, {"prompt": "two", "reference": "deux"}]
    objects.write_text("\n".join(map(json.dumps, records)))
    assert workload.from_file(str(objects), 9).references == ["un", "deux"]
    objects.write_text("\n".join(map(json.dumps, [records[0], {"prompt": "two"}])))
    assert workload.from_file(str(objects), 9).references is None


def test_a_file_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        workload.from_file(str(tmp_path / "none.txt"), 2)
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    assert workload.from_file(str(file), 1).prompts == ["one"]
    with pytest.raises(UserError, match="line 2 has no prompt"):
        workload.from_file(str(file), 2)


def test_cutting_into_turns():
    prompts = workload.held_out("fix", 5, "x")
    turns = workload.cut(5, 2)
    assert turns == [range(0, 2), range(2, 4), range(4, 5)]
    assert workload.texts(prompts, turns[1]) == prompts.prompts[2:4]
