"""Outputs that are gone on with: what is kept, and that they end as if never interrupted."""

import json
import os
from pathlib import Path

import pytest

from mlx_t5.cli.resume import Form, Kept, kept
from mlx_t5.errors import UserError

# ---- what is kept --------------------------------------------------------------------------------


def found(tmp_path, data: str, items: list, **form) -> Kept:
    path = tmp_path / "out"
    path.write_bytes(data.encode())
    return kept(str(path), iter(items), Form(**form), len(items))


def test_complete_lines_are_kept_and_a_half_one_is_dropped(tmp_path):
    assert kept(str(tmp_path / "none"), iter("ab"), Form()) == Kept()
    assert found(tmp_path, "", ["a", "b"]) == Kept()
    assert found(tmp_path, "é\u2028x\n\nhal", ["a", "b", "c"]) == Kept(2, 8)
    assert found(tmp_path, "1\n2\n3\n4", ["a", "b"], texts=2) == Kept(1, 4)


def test_as_many_prompts_are_drawn_as_are_done(tmp_path):
    items = iter("abc")
    (tmp_path / "out").write_text("1\n2\n3")
    kept(str(tmp_path / "out"), items, Form())
    assert list(items) == ["c"]


@pytest.mark.parametrize("data", ["1\n2\n3\n", "1\n2\n3"])
def test_results_of_more_prompts_than_the_input_has_are_refused(tmp_path, data):
    with pytest.raises(UserError, match="more prompts than the input, which has 2"):
        found(tmp_path, data, ["a", "b"])


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match="goes on with a file, which .* is not"):
            kept(name, iter("ab"), Form())


def test_objects_have_to_be_of_their_prompts(tmp_path):
    def lines(*records: dict) -> str:
        return "".join(json.dumps(record) + "\n" for record in records)

    bad = UserError("line 2 is not UTF-8")
    data = lines({"prompt": "a", "text": "A"}, {"prompt": "", "text": None, "error": "…"})
    assert found(tmp_path, data, ["a", bad, "c"], result="text").prompts == 2
    with pytest.raises(UserError, match="out line 2 has another prompt"):
        found(tmp_path, data, ["a", "b", "c"], result="text")
    with pytest.raises(UserError, match="line 1 is no object with 'logprob'"):
        found(tmp_path, data, ["a", bad], result="logprob")
    with pytest.raises(UserError, match="line 1 is no object with 'text'"):
        found(tmp_path, "[1]\n", ["a"], result="text")
    scored = lines({"prompt": "a", "target": "b", "logprob": -1.0})
    assert found(tmp_path, scored, [("a", "b")], result="logprob").prompts == 1
    with pytest.raises(UserError, match="another target"):
        found(tmp_path, scored, [("a", "c")], result="logprob")


# ---- from end to end -----------------------------------------------------------------------------

TIMES = ("encode_seconds", "decode_seconds", "tokens_per_second", "peak_memory_bytes")
SAMPLES = ["-m", "12", "--temp", "1", "--num-samples", "2"]


def timeless(path: Path) -> str:
    """An output without its times."""
    if path.suffix != ".jsonl":
        return path.read_text("utf-8")
    records = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    for record in records:
        for name in TIMES:
            record.get("stats", {}).pop(name, None)
    return "\n".join(map(json.dumps, records))


@pytest.mark.parametrize(
    "name, options",
    [
        ("out.txt", SAMPLES),
        ("out.jsonl", SAMPLES),
        ("out.jsonl", ["--embed"]),
        ("out.jsonl", ["--score"]),
    ],
)
def test_wherever_a_run_was_cut_the_resumed_output_is_that_of_an_uninterrupted_one(
    run, models, tmp_path, name, options
):
    lines = tmp_path / "in.jsonl"
    items = [{"prompt": f"line {i}\u2028é", "target": "é"} for i in range(6)]
    lines.write_text("".join(map("{}\n".format, [json.dumps(i) for i in items])) + "no JSON\n")
    out = tmp_path / name
    argv = [*models, *options, "--input-file", str(lines), "--output-file", str(out)]
    argv += ["--batch-size", "2"]
    assert run(*argv)[0] == 2
    whole, wanted = out.read_bytes(), timeless(out)
    for cut in (len(whole) // 3, whole.rindex(b"\n", 0, -1) + 1):
        out.write_bytes(whole[:cut])
        status, _, err = run(*argv, "--resume")
        assert status == 2 and "line 7 is not JSON" in err
        assert timeless(out) == wanted
    status, _, err = run(*argv, "--resume")
    assert (status, err.splitlines()[-1]) == (0, "all 7 prompts are done")
    assert timeless(out) == wanted


def test_without_resume_an_output_is_written_anew(run, models, tmp_path):
    (tmp_path / "in.txt").write_text("a\nb\n")
    out = tmp_path / "out.txt"
    argv = [*models, "-m", "3", "--input-file", str(tmp_path / "in.txt"), "--output-file", str(out)]
    out.write_text("1\n2\n3\n")
    status, _, err = run(*argv, "--resume")
    assert status == 2 and err.startswith(f"error: {out} has results of more prompts")
    assert out.read_text() == "1\n2\n3\n"
    assert run(*argv)[0] == 0
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "options, told",
    [
        (["--resume"], "give --input-file and --output-file"),
        (["--resume", "--output-file", "x.txt"], "give --input-file and --output-file"),
        (
            ["--resume", "--embed", "--input-file", "x", "--output-file", "x.npy"],
            "goes on with lines",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(run, options, told):
    status, out, err = run(*options)
    assert (status, out) == (2, "") and told in err and err.count("\n") == 1
