"""Tests which prompts are measured and how the header describes them."""

import json

import pytest

from benchmarks import workload
from mlx_t5.errors import UserError


def test_held_out_prompts_have_one_reference_each():
    prompts = workload.held_out("fix", 5)
    assert prompts.tasks == ["fix"] * 5 and prompts.name == "fix"
    assert all(prompt.startswith("fix grammar: ") for prompt in prompts.prompts)
    assert prompts.prompts[:3] == workload.held_out("fix", 3).prompts
    assert len(prompts.references) == 5 and not set(prompts.prompts) & set(prompts.references)
    mixed = workload.held_out("mixed", 9)
    for task, count in (("translate", 5), ("fix", 4)):
        alone, positions = workload.held_out(task, count), mixed.positions(task)
        assert [mixed.prompts[i] for i in positions] == alone.prompts
        assert [mixed.references[i] for i in positions] == alone.references
    assert len(workload.held_out("mixed", 2000).prompts) == 2000
    with pytest.raises(UserError, match="there are 1000 held-out prompts of fix, not 1001"):
        workload.held_out("fix", 1001)


def test_prompts_and_references_are_read_from_files(tmp_path):
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text("one\ntwo\nthree\n")
    work = workload.from_file(str(lines), 2)
    assert (work.name, work.prompts, work.references) == ("lines.txt", ["one", "two"], None)
    assert work.positions("lines.txt") == [0, 1]
    records = [{"prompt": "one", "target": "un"}, {"prompt": "two", "target": "deux"}]
    objects.write_text("\n".join(map(json.dumps, records)))
    assert workload.from_file(str(objects), 9).references == ["un", "deux"]
    objects.write_text("\n".join(map(json.dumps, [records[0], {"prompt": "two"}])))
    assert workload.from_file(str(objects), 9).references is None
    objects.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    assert workload.from_file(str(objects), 1).prompts == ["one"]
    with pytest.raises(UserError, match="line 2 has no prompt"):
        workload.from_file(str(objects), 2)


def test_a_share_of_a_predictions_words_is_changed():
    texts = ["a b c d", "e f g h " * 100]
    assert workload.changed(texts, 0) == ["a b c d", texts[1].strip()]
    for before, after in zip(texts, workload.changed(texts, 100), strict=True):
        pairs = list(zip(before.split(), after.split(), strict=True))
        assert all(a != b and b in "abcdefgh" for a, b in pairs)
    (half,) = workload.changed(texts[1:], 50)
    assert 120 < sum(a != b for a, b in zip(texts[1].split(), half.split(), strict=True)) < 280
    assert workload.changed(["only"], 100) == ["only"], "there is no other word"
