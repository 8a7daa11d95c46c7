"""One file over several ranks: the output is that of one process, also if a rank is killed."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

import main
from launching import finds_ranks, finish, launch, needs_ring, ranks_of
from meeting import Meeting
from mlx_t5.backend import mx

PATIENCE = 120
SAMPLED = ["--temp", "1", "--seed", "3", "--batch-size", "2", "--num-samples", "2", "-m", "24"]
TIMES = ("encode_seconds", "decode_seconds", "tokens_per_second", "peak_memory_bytes")
LINES = [f"line {i}" for i in range(27)]
BAD = 25  # a line that cannot be read, near the end: the run that is killed does not come to it


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The file, one of whose lines is empty."""
    path = tmp_path_factory.mktemp("input") / "in.txt"
    path.write_text("\n".join("" if i == BAD else line for i, line in enumerate(LINES)))
    return ["--input-file", str(path)]


def records(path) -> list[dict]:
    """The objects of an output, without times."""
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for record in found:
        for name in TIMES:
            del record["stats"][name]
    return found


def lines_of(folder) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("out.jsonl.part-*"))


@needs_ring
@finds_ranks
@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_a_start_with_resume(models, source, tmp_path):
    out, wanted = tmp_path / "out.jsonl", tmp_path / "wanted.jsonl"
    options = [*models, *SAMPLED, *source]
    assert main.main([*options, "--output-file", str(wanted)]) == 2, "of the empty line"
    command = ["main.py", "--parallel", "data", *options, "--output-file", str(out), "--resume"]
    started = launch(2, *command)
    end = time.monotonic() + PATIENCE
    while lines_of(tmp_path) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(ranks_of(started)[1], signal.SIGKILL)
    finish(started, PATIENCE)
    assert not out.exists() and lines_of(tmp_path) >= 8
    _, err = finish(launch(2, *command, "-v"), PATIENCE)
    assert records(out) == records(wanted), err
    made = [f"{path.name}{end}" for path in (out, wanted) for end in ("", ".resume")]
    assert sorted(os.listdir(tmp_path)) == sorted(made), "the parts are gone"
    kept = [out.with_name(f"{path.name}.resume").read_text() for path in (out, wanted)]
    assert kept[0] == kept[1] and kept[0].endswith(f"\n{BAD + 1}\n"), "what ends in an error"
    assert "resuming: " in err and "results by rank: 0: " in err
    assert err.count("peak memory") == 1, "one rank tells"
    assert f"error: {source[1]} line {BAD + 1} is empty" in err, "whoever has it"


@pytest.fixture
def threads(monkeypatch):
    """Runs the command line as so many ranks, which are threads of this process."""

    def run(count, *argv):
        here = threading.local()

        def work(ranks):
            here.ranks = ranks
            try:
                return main.main(["--parallel", "data", *argv])
            finally:
                mx.synchronize()
                mx.clear_streams()

        with monkeypatch.context() as patch:
            patch.setattr(main, "join", lambda: here.ranks)
            return Meeting(count).run(work)

    return run


def test_vectors_of_all_ranks_are_one_array(models, source, tmp_path, threads):
    options = [*models, *source, "--embed", "--normalize", "--output-file"]
    wanted, out = tmp_path / "wanted.npy", tmp_path / "out.npy"
    assert main.main([*options, str(wanted)]) == 2
    assert threads(3, *options, str(out)) == [2, 0, 0]
    found = np.load(out)
    assert np.isnan(found[BAD]).all() and len(found) == len(LINES)
    np.testing.assert_allclose(found, np.load(wanted), atol=1e-5)


def test_parts_of_another_job_are_not_joined(models, source, tmp_path, threads, capsys):
    """A part ends in the middle of a run with other settings; an error in it is not forgotten."""
    out = tmp_path / "out.txt"
    options = [*models, *source, "--output-file", str(out), "--resume", "-m"]
    assert main.main([*options, "2"]) == 2
    record, part = out.with_name("out.txt.resume"), out.with_name("out.txt.part-1-of-2")
    record.rename(part.with_name(f"{part.name}.resume"))
    out.rename(part)
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[::2][:-1]))
    capsys.readouterr()
    errors = threads(2, *options, "3")
    assert errors == [2, 2] and not out.exists()
    assert f"{part} was written with --max-tokens 2; give that again" in capsys.readouterr().err
    assert threads(2, *options, "2") == [2, 0]
    assert out.read_text() == "".join(lines) and record.exists() and not part.exists()


def test_documents_are_shared_out_whole(models, tmp_path, threads):
    """Their texts are sampled, so each has to have the streams of its place."""
    source, wanted, out = (tmp_path / name for name in ("in.jsonl", "wanted.jsonl", "out.jsonl"))
    texts = ["One. Two.\n\nThree.", "...", "Four. Five.", "Six.", "Seven. Eight. Nine."]
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = [*models, "--input-file", str(source), "--split", "sentences", "--output-file"]
    sampled = ["--temp", "1", "--seed", "3", "-m", "8"]
    assert main.main([*options, str(wanted), *sampled]) == 0
    assert threads(2, *options, str(out), *sampled) == [0, 0]
    assert records(out) == records(wanted)
    assert [len(record["pieces"]) for record in records(out)] == [3, 0, 2, 1, 3]
