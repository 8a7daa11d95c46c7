"""`peers`: its figures by the letter, and a small run. What it measures is not judged."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import command_line, peers
from benchmarks.timing import Ratio, Timed
from mlx_t5.errors import UserError

RUN = ["--count", "3", "--turn", "2", "--repeats", "1", "--pause", "0", "--dtype", "float32"]
RUN += ["--max-tokens", "6"]


@pytest.fixture(autouse=True)
def on_one_core(monkeypatch):
    """Torch's other devices round differently; several threads may wait long on a busy machine."""
    monkeypatch.setattr(peers, "torch_device", lambda: "cpu")
    monkeypatch.setattr(peers.report, "threads", lambda: 1)


def timed(seconds, outcomes):
    tokens = [[sum(len(t) + 1 for t in turn) for turn in row] for row in outcomes]
    return Timed(seconds, tokens, outcomes)


REGULAR = timed([[4.0]] * 2, [[[[5, 6, 7], [8]]]] * 2)


def test_turns_have_several_prompts_and_the_end_token_counts():
    seen = []

    def decode(ids):
        seen.append(ids)
        return [7] * len(ids)

    args = SimpleNamespace(turn=2, repeats=1, pause=0)
    timed = peers.measure({"regular": (decode, "cpu")}, [[1], [2, 2], [3, 3, 3]], args)
    assert timed["regular"].outcomes == [[[[7], [7, 7]], [[7, 7, 7]]]]
    assert timed["regular"].tokens == [[2 + 3, 4]]
    assert seen == [[1], [2, 2], [3, 3, 3]] * 2  # once to warm up


def test_ratios_are_to_regular_and_to_transformers_and_the_fastest_is_first():
    figures = {
        "regular": REGULAR,
        "draft 5": timed([[1.0]] * 2, [[[[5, 6, 7], [8]]]] * 2),
        peers.GREEDY: timed([[8.0]] * 2, [[[[5, 6, 7], [8]]], [[[5, 6, 0], [8]]]]),
    }
    rows = peers.summarise(figures, dict.fromkeys(figures, "cpu"))
    assert [row["way"] for row in rows] == ["draft 5", "regular", peers.GREEDY]
    assert [row["speed_up"].value for row in rows] == [4.0, 1.0, 0.5]
    assert [row["over_transformers"].value for row in rows] == [8.0, 2.0, 1.0]
    assert [row["different"] for row in rows] == [0, 0, 1]
    assert [row["ours"] for row in rows] == [True, True, False]
    cells = [write(rows[0]) for write in peers.COLUMNS.values()]
    assert cells == ["draft 5", "6", str(Ratio(4, 4, 4)), str(Ratio(8, 8, 8)), "equal", "cpu"]


def test_without_transformers_there_is_no_ratio_to_it():
    (row,) = peers.summarise({"regular": REGULAR}, {"regular": "gpu"})
    assert row["over_transformers"] == ""


def test_a_system_that_fails_is_left_out_with_its_reason():
    def broken(ids):
        raise IndexError("list index out of range\nmore")

    def works(ids):
        return []

    systems = {name: (works, "cpu") for name in ("regular", "draft 5", peers.GREEDY)}
    systems[peers.ASSISTED] = (broken, "cpu")
    missing = {}
    subject = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [5, 1]))
    working = peers.without_failures(systems, subject, missing)
    assert list(working) == ["regular", "draft 5", peers.GREEDY]
    assert missing == {peers.ASSISTED: "IndexError: list index out of range"}
    assert f"left out: {peers.ASSISTED} (IndexError" in peers.remarks([], "float32", missing)


def test_a_failure_of_our_own_is_not_hidden():
    def broken(ids):
        raise UserError("ours")

    subject = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [5, 1]))
    assert peers.without_failures({"regular": (broken, "cpu")}, subject, {})  # not even asked
    with pytest.raises(UserError, match="ours"):
        args = SimpleNamespace(turn=1, repeats=1, pause=0)
        peers.measure({"regular": (broken, "cpu")}, [[5, 1]], args)


def test_differences_are_pointed_out_where_texts_should_be_equal():
    rows = [{"way": "a", "different": 0}, {"way": "b", "different": 2}]
    assert peers.remarks(rows, "float32", {}).endswith("not so: b.")
    assert "rounding" in peers.remarks(rows, "bfloat16", {})
    assert "rounding" not in peers.remarks(rows[:1], "bfloat16", {})


def test_a_small_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "figures.json"
    argv = ["peers", *RUN, "--num-draft", "2", "auto", "--json", str(file)]
    assert command_line.main(argv) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["left_out"] == {} and "left out" not in out
    assert {row["way"] for row in record["rows"]} == {
        *("regular", "draft 2", "draft auto", peers.GREEDY, peers.CT2),
        *(peers.ASSISTED, f"{peers.ASSISTED} 2"),
    }
    assert all(row["different"] == 0 for row in record["rows"])
    assert all(len(turns) == 2 for row in record["rows"] for turns in row["seconds"])
    assert "torch 2" in out and "ctranslate2 4" in out and "threads" in out


def test_a_run_without_ctranslate2(capsys, tmp_path, monkeypatch):
    def missing(*args):
        raise UserError("ctranslate2 cannot be imported")

    monkeypatch.setattr(peers, "CTranslate2", missing)
    assert command_line.main(["peers", *RUN, "--num-draft", "2"]) == 0
    out = capsys.readouterr().out
    assert f"left out: {peers.CT2} (ctranslate2 cannot be imported)" in out
    assert f"| {peers.CT2} |" not in out and f"| {peers.GREEDY} |" in out
