"""Tests `peers`: exact figures and small runs. The measured values are not judged."""

import json
import re
from types import SimpleNamespace

import pytest

import benchmark
from benchmarks import peers
from benchmarks.peer_programs import Answer
from mlx_t5.errors import UserError
from mlx_t5.timing import Timed

FAKE = "fake_program:Fake"
OPTIONS = ["--count", "3", "--repeats", "1", "--pause", "0", "--max-tokens", "6"]


ARGS = SimpleNamespace(repeats=1, pause=0, max_tokens=9, document=False, sampling=False)


def timed(seconds, tokens=([5, 6, 7], [8])):
    """Returns two repeats of one turn; only the times and tokens in the answers count."""
    decided = sum(len(text) + 1 for text in tokens)
    return Timed([[0.0]] * 2, [[0]] * 2, [[Answer(list(tokens), decided, s)] for s in seconds])


def backwards(prompts, **keywords):
    return Answer([ids[::-1] for ids in prompts], 3 * len(prompts), 2.0, 0.5)


def test_rows_have_ratios_to_other_variants_and_the_fastest_is_first():
    other = [[5, 6, 0], [8]]
    variants = {
        "regular": timed([4.0] * 2),
        "draft 5": timed([1.0] * 2),
        peers.GREEDY: timed([8.0] * 2, other),
        peers.CT2: timed([2.0] * 2),
    }
    rows = peers.summarize(variants)
    assert [row["way"] for row in rows] == ["draft 5", peers.CT2, "regular", peers.GREEDY]
    assert [row["speed_up"].value for row in rows] == [4.0, 2.0, 1.0, 0.5]
    assert [row["over"][peers.GREEDY].value for row in rows] == [8.0, 4.0, 2.0, 1.0]
    assert [row["different"] for row in rows] == [0, 0, 0, 1]
    table = {"batch_size": 4, "document": False, "count": 2, "rows": rows, "left_out": {}}
    assert peers.table_text(table, "float32").endswith(f"different: {peers.GREEDY}.")


def test_a_failing_program_is_left_out_but_never_this_project():
    def never(**keywords):
        raise UserError("cannot")

    table = peers.compare({"regular": backwards, peers.CT2: never}, [[5, 1], [6, 1]], 1, ARGS)
    assert [row["way"] for row in table["rows"]] == ["regular"]
    assert table["left_out"] == {peers.CT2: "cannot"}
    with pytest.raises(UserError, match="cannot"):
        peers.compare({"regular": backwards, "draft 5": never}, [[5, 1]], 1, ARGS)


@pytest.mark.slow
def test_a_run_in_processes_without_one_program(capfd, tmp_path, monkeypatch):
    """The other programs are fakes; test_benchmark_peer_programs.py loads the real ones.

    It uses one OpenBLAS thread, because threads may wait for each other on a busy machine.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    make = peers.Process

    def process(what, environment, **keywords):
        fails = {"fails": "at start"} if "scratch" in keywords else {}
        return make(what, environment, **keywords, **fails)

    monkeypatch.setattr(peers, "Process", process)
    programs = dict.fromkeys(peers.PROGRAMS, FAKE)
    programs[peers.PROJECT] = peers.PROGRAMS[peers.PROJECT]
    monkeypatch.setattr(peers, "PROGRAMS", programs)
    file = tmp_path / "figures.json"
    argv = ["peers", *OPTIONS, "--num-draft", "2", "--batch-size", "1", "3", "--json", str(file)]
    assert benchmark.main([*argv, "--dtype", "float32"]) == 0  # the fakes may differ
    out, _ = capfd.readouterr()
    threads = re.findall(r"\bthreads (\d+)", out)
    assert len(threads) == 2 and len(set(threads)) == 1
    assert out.count("left out: CTranslate2 (no such library; install it)") == 2
    tables = json.loads(file.read_text())["tables"]
    assert [table["batch_size"] for table in tables] == [1, 3]
    transformers = [peers.GREEDY, peers.ASSISTED, f"{peers.ASSISTED} 2"]
    for table in tables:
        different = {row["way"]: row["different"] for row in table["rows"]}
        assert different == {"regular": 0, "draft 2": 0, **dict.fromkeys(transformers, 3)}
