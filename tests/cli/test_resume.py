"""Resumed outputs keep finished results and end as if they had never been interrupted."""

import json
import os
from pathlib import Path

import pytest

from mlx_t5.cli.input import Line
from mlx_t5.cli.resuming import ResumePoint, find_resume_point
from mlx_t5.errors import UserError

# ---- what is kept --------------------------------------------------------------------------------


def kept(tmp_path, data: str, items: list, texts=1, result=None) -> ResumePoint:
    path = tmp_path / "out"
    path.write_bytes(data.encode())
    lines = [item if isinstance(item, Line) else Line(item) for item in items]
    return find_resume_point(str(path), iter(lines), texts, result, len(lines))


def test_complete_lines_are_kept_and_a_half_one_is_dropped(tmp_path):
    assert find_resume_point(str(tmp_path / "none"), iter(map(Line, "ab"))) == ResumePoint()
    assert kept(tmp_path, "", ["a", "b"]) == ResumePoint()
    assert kept(tmp_path, "é\u2028x\n\nhal", ["a", "b", "c"]) == ResumePoint(2, 8)
    assert kept(tmp_path, "1\n2\n3\n4", ["a", "b"], texts=2) == ResumePoint(1, 4)


def test_pipes_and_results_of_more_prompts_are_refused(tmp_path):
    for data in ("1\n2\n3\n", "1\n2\n3"):
        with pytest.raises(UserError, match="more prompts than the input, which has 2"):
            kept(tmp_path, data, ["a", "b"])
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match="needs a regular file, which .* is not"):
            find_resume_point(name, iter(map(Line, "ab")))


BAD = UserError("line 2 is not UTF-8")
TEXTS = [{"prompt": "a", "text": "A"}, {"prompt": "", "text": None, "error": "…"}]
SCORED = [{"prompt": "a", "target": "b", "logprob": -1.0}]


@pytest.mark.parametrize(
    ("records", "items", "result", "message"),
    [
        (TEXTS, ["a", BAD, "c"], "text", None),
        (TEXTS, [Line("a", prediction="A"), BAD, Line("c")], "text", None),
        (SCORED, [Line("a", target="b")], "logprob", None),
        (TEXTS, ["a", "b", "c"], "text", "out line 2 has another prompt"),
        (TEXTS, [Line("b", prediction="A"), BAD], "text", "line 1 has another prompt"),
        (SCORED, [Line("a", target="c")], "logprob", "another target"),
        (TEXTS, ["a", BAD], "logprob", "line 1 is not an object with 'logprob'"),
        ([[1]], ["a"], "text", "line 1 is not an object with 'text'"),
    ],
)
def test_resumed_objects_must_belong_to_their_prompts(tmp_path, records, items, result, message):
    data = "".join(json.dumps(record) + "\n" for record in records)
    if message is None:
        assert kept(tmp_path, data, items, result=result).prompts == len(records)
    else:
        with pytest.raises(UserError, match=message):
            kept(tmp_path, data, items, result=result)


# ---- from end to end -----------------------------------------------------------------------------

TIMES = ("encode_seconds", "decode_seconds", "tokens_per_second", "peak_memory_bytes")
SAMPLES = ["-m", "12", "--temp", "1", "--num-samples", "2"]


def timeless(path: Path) -> str:
    """Returns the text of an output without its times."""
    if path.suffix != ".jsonl":
        return path.read_text("utf-8")
    records = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    for record in records:
        for name in TIMES:
            record.get("stats", {}).pop(name, None)
    return "\n".join(map(json.dumps, records))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("out.txt", SAMPLES),
        ("out.jsonl", SAMPLES),
        ("out.jsonl", ["--embed"]),
        ("out.jsonl", ["--score"]),
    ],
)
def test_a_run_cut_anywhere_resumes_to_the_output_of_a_whole_run(
    run, models, tmp_path, name, options
):
    lines = tmp_path / "in.jsonl"
    both = {"target": "é", "prediction": "é à"}
    items = [{"prompt": f"line {i}\u2028é", **both} for i in range(6)]
    items = [*map(json.dumps, items[:1]), "no JSON", *map(json.dumps, items[1:])]
    lines.write_text("".join(map("{}\n".format, items)))
    out = tmp_path / name
    argv = [*models, *options, "--input-file", str(lines), "--output-file", str(out)]
    # The last digits of scores depend on the other rows of a pass.
    argv += ["--batch-size", "2" if options == SAMPLES else "1"]
    assert run(*argv)[0] == 2
    whole, expected = out.read_bytes(), timeless(out)
    for cut in (len(whole) // 2, whole.rindex(b"\n", 0, -1) + 1):
        out.write_bytes(whole[:cut])
        status, _, err = run(*argv, "--resume")
        assert status == 0 and "resuming: " in err, "the bad line is not one of its own"
        assert timeless(out) == expected
    status, _, err = run(*argv, "--resume")
    lines = whole.count(b"\n")
    assert status == 0 and err.endswith(f"{lines} lines are kept, 7 of 7 prompts are done\n")
    assert timeless(out) == expected


def test_without_resume_an_output_is_overwritten(run, models, tmp_path):
    (tmp_path / "in.txt").write_text("a\nb\n")
    out = tmp_path / "out.txt"
    argv = [*models, "-m", "3", "--input-file", str(tmp_path / "in.txt"), "--output-file", str(out)]
    out.write_text("1\n2\n3\n")
    status, _, err = run(*argv, "--resume")
    assert status == 2 and err.startswith(f"error: {out} has results of more prompts")
    assert out.read_text() == "1\n2\n3\n"
    assert run(*argv)[0] == 0
    assert len(out.read_text().splitlines()) == 2
