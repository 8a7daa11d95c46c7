"""Tests `peers`: exact figures and small runs. The measured values are not judged."""

import contextlib
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import benchmark
from benchmarks import peers
from benchmarks.peer_programs import Answer
from mlx_t5.backend import on_cpu
from mlx_t5.cli.arguments import INTERRUPTED
from mlx_t5.errors import UserError
from mlx_t5.timing import Ratio, Timed
from serving_process import ROOT

FAKE = "fake_program:Fake"
OPTIONS = ["--count", "3", "--repeats", "1", "--pause", "0", "--max-tokens", "6"]


def args(**more):
    options = {"repeats": 1, "pause": 0, "max_tokens": 9, "document": False, "sampling": False}
    return SimpleNamespace(**options | more)


def timed(seconds, tokens=([5, 6, 7], [8]), first=None):
    """Returns two repeats of one turn; only the times and tokens in the answers count."""
    decided = sum(len(text) + 1 for text in tokens)
    return Timed(
        [[0.0]] * 2, [[0]] * 2, [[Answer(list(tokens), decided, s, first)] for s in seconds]
    )


def backwards(seen):
    def decode(prompts, **keywords):
        seen.append((prompts, keywords))
        tokens = [ids[::-1] for ids in prompts]
        return Answer(tokens, 3 * len(tokens), 2.0, 0.5 if keywords["first"] else None)

    return decode


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_turn_is_one_prompt_or_with_batches_all_prompts(batch_size):
    seen, ids, single = [], [[5, 1], [6, 1], [7, 1]], batch_size == 1
    table = peers.compare({"regular": backwards(seen)}, ids, batch_size, args())
    turns = [[prompt] for prompt in ids] if single else [ids]
    assert [prompts for prompts, _ in seen] == [turns[0][:2], *turns * 2]
    expected = {"max_tokens": 9, "batch_size": batch_size, "first": single}
    assert all(keywords == expected for _, keywords in seen)
    (row,) = table["rows"]
    assert sum(row["tokens"], []) == [[1, 5], [1, 6], [1, 7]]
    assert row["tokens_per_second"] == 9 / (6.0 if single else 2.0)  # the end tokens count
    first = (row.get("first_token_seconds"), row.get("decode_seconds_a_token"))
    assert first == ((0.5, 0.75) if single else (None, None))
    text = peers.table_text(table, "float32")
    assert text.startswith(f"3 prompts, batch {batch_size}\n") and ("ms/token" in text) == single


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
    cells = [write(rows[0]) for write in peers.COLUMNS.values()]
    ratios = [str(Ratio(n, n, n)) for n in (4, 8, 2)]
    assert cells == ["draft 5", "6", *ratios, "1.00", "2.0", "equal"]
    table = {"batch_size": 4, "document": False, "count": 2, "rows": rows, "left_out": {}}
    assert peers.table_text(table, "float32").endswith(f"different: {peers.GREEDY}.")
    assert "rounding" in peers.table_text(table, "bfloat16")
    (row,) = table["rows"] = peers.summarize({"regular": timed([1.0] * 2)})  # no other programs
    assert "rounding" not in peers.table_text(table, "bfloat16")
    assert [write(row) for write in peers.COLUMNS.values()][3:5] == ["", ""]


def test_decoding_time_leaves_out_the_first_tokens():
    draft, regular = peers.summarize(
        {"regular": timed([5.0, 7.0], first=1.0), "draft 5": timed([4.0, 4.0], first=2.0)}
    )
    assert (regular["first_token_seconds"], draft["first_token_seconds"]) == (0.5, 1.0)
    assert (regular["decode_seconds_a_token"], draft["decode_seconds_a_token"]) == (5 / 4, 2 / 4)
    assert draft["decode_speed_up"] == Ratio(2.5, 2.0, 3.0)
    cells = [write(draft) for write in peers.DECODING.values()]
    assert cells == ["draft 5", "1000.0", "500.00", "2.50 (2.00 to 3.00)"]
    # Empty texts have no figures of decoding.
    (row,) = peers.summarize({"regular": timed([1.0] * 2, [[], []], first=1.0)})
    assert "decode_speed_up" not in row


def test_a_document_is_compared_with_single_and_batched_sentences():
    seen, ids, texts = [], [[5, 1], [6, 1], [7, 1]], ["t: Five.", "t: Six.", "t: Seven."]

    def by_name(name):
        def decode(prompts, **keywords):
            seen.append((name, list(prompts), keywords["batch_size"]))
            return Answer([source[::-1] for source in ids[: len(prompts)]], 9, 2.0)

        return decode

    names = ("regular", "draft 5", peers.ASSISTED, peers.CT2)
    variants = peers.of_document({name: by_name(name) for name in names}, texts)
    table = peers.compare(variants, ids, 2, args(document=True))
    ways = {"regular", "document, regular", "document, draft 5", peers.CT2}
    assert {row["way"] for row in table["rows"]} == ways
    calls = [("regular", ids, 1), ("regular", texts, 2), ("draft 5", texts, 2), (peers.CT2, ids, 2)]
    assert seen[:4] == [(name, prompts[:2], size) for name, prompts, size in calls]
    assert sorted(map(repr, seen[4:])) == sorted(map(repr, calls))
    title = "3 prompts, as one document, regular one by one, batch 2\n"
    assert peers.table_text(table, "float32").startswith(title)
    assert [peers.is_project(name) for name in sorted(ways)] == [False, True, True, True]


def test_sampled_texts_are_timed_beside_greedy_ones_but_not_compared():
    seen = []
    every = dict.fromkeys(["regular", "draft 5", peers.GREEDY, peers.ASSISTED], backwards(seen))
    variants = peers.sampled(every)
    table = peers.compare(variants, [[5, 1], [6, 1]], 2, args(sampling=True))
    rows = [f"{name} with {how}" for name in ("regular", "transformers") for how in peers.SAMPLING]
    different = {row["way"]: row["different"] for row in table["rows"]}
    assert different == {"regular": 0, peers.GREEDY: 0, **dict.fromkeys(rows)}
    common = {"max_tokens", "batch_size", "first"}
    settings = [{n: x for n, x in keywords.items() if n not in common} for _, keywords in seen]
    assert all(settings.count(how) == 6 for how in ({}, *peers.SAMPLING.values()))
    text = peers.table_text(table, "float32")
    assert "then ms/token" in text and "different: " not in text and " | sampled |" in text


def test_failing_programs_are_left_out_with_the_reason():
    calls = []

    def later(**keywords):
        calls.append(keywords)
        if len(calls) > 2:
            raise UserError("its process ended with signal 9")
        return backwards([])(**keywords)

    def never(**keywords):
        raise UserError("cannot")

    variants = {"regular": backwards([]), peers.CT2: later, peers.ASSISTED: never}
    table = peers.compare(variants, [[5, 1], [6, 1], [7, 1]], 1, args())
    assert [row["way"] for row in table["rows"]] == ["regular"]
    why = {peers.ASSISTED: "cannot", peers.CT2: "its process ended with signal 9"}
    assert table["left_out"] == why and len(calls) == 3
    assert peers.table_text(table, "float32").endswith(f"left out: {peers.CT2} ({why[peers.CT2]})")
    with pytest.raises(UserError, match="cannot"):  # this project's own failures are not hidden
        peers.compare({"regular": backwards([]), "draft 5": never}, [[5, 1]], 1, args())


def test_the_parent_process_loads_no_library_of_the_programs():
    code = "import sys, benchmarks.peers; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "benchmarks" in loaded and not loaded & {"mlx", "numpy", "torch", "ctranslate2"}


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
    for part in ("machine ", "mlx ", "blas " if on_cpu() else "device gpu"):
        assert part in out.split("\n")[1]
    if "blas OpenBLAS" in out:
        assert "threads 1," in out.split("\n")[1]
    threads = re.findall(r"\bthreads (\d+)", out)
    assert len(threads) == 2 and len(set(threads)) == 1
    assert out.count("left out: CTranslate2 (no such library; install it)") == 2
    tables = json.loads(file.read_text())["tables"]
    assert [table["batch_size"] for table in tables] == [1, 3]
    transformers = [peers.GREEDY, peers.ASSISTED, f"{peers.ASSISTED} 2"]
    for table in tables:
        different = {row["way"]: row["different"] for row in table["rows"]}
        assert different == {"regular": 0, "draft 2": 0, **dict.fromkeys(transformers, 3)}


def test_programs_get_valid_arguments_and_threads_that_soon_sleep(monkeypatch):
    processes = []

    def process(what, environment, **keywords):
        module, _, program = what.partition(":")
        inspect.signature(getattr(importlib.import_module(module), program)).bind(**keywords)
        processes.append((what, environment))
        return contextlib.nullcontext()

    monkeypatch.setattr(peers, "Process", process)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "7")  # set by the user
    peers.start(peers.PROJECT, {}, model="a", draft_model="b", dtype=None)
    project = SimpleNamespace(call=lambda method, scratch: [f"{scratch}/target", "draft"])
    with contextlib.ExitStack() as stack:
        facts = {"dtype": "float32", "device": "cpu", "threads": 3, "mlx": "1"}
        peers.start_others(project, facts, stack)
    waiting = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "7"}
    limited = waiting | dict.fromkeys(peers.THREADS, "3")
    assert processes == list(zip(peers.PROGRAMS.values(), (waiting, limited, limited), strict=True))


def test_ctrl_c_ends_all_processes(tmp_path):
    code = (
        "import sys, benchmark; from benchmarks import peers\n"
        f"peers.PROGRAMS = dict.fromkeys(peers.PROGRAMS, {FAKE!r})\n"
        f"sys.exit(benchmark.main(['peers', *{OPTIONS!r}]))"
    )
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "benchmarks")])}
    more |= {"FAKE_FAILS": "by sleeping", "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **more},
        start_new_session=True,
    )
    pids: list[str] = []
    while len(pids) < len(peers.PROGRAMS):
        line = running.stdout.readline()
        assert line, running.stderr.read()
        pids += re.findall(r"\bpid (\d+)", line)
    os.killpg(running.pid, signal.SIGINT)  # a terminal signals the whole process group
    _, errors = running.communicate()
    assert (running.returncode, errors) == (INTERRUPTED, 3 * "libraries talk\n")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    assert not list(tmp_path.iterdir())
