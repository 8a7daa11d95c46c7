"""Tests how results are written, without a model: files, colors and sums of statistics."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from mlx_t5.cli.generate_options import read_options
from mlx_t5.cli.input import Line
from mlx_t5.cli.output import ArrayFile, LineFile, TokenHighlighter, summary, text_lines
from mlx_t5.engine.document_results import DocumentStats
from mlx_t5.engine.rows import Result, Stats
from mlx_t5.errors import UserError

STATS = Stats(
    generated_tokens=10, target_calls=4, drafted=12, accepted=6, tokens_per_call=2.5,
    peak_memory_bytes=2_500_000_000,
)  # fmt: skip


def result(text: str | None, **more) -> Result:
    return Result(text, [5, 6], ["draft", "target"], "stop", STATS, **more)


class Colored:
    """A highlighter whose every line is the same."""

    def line(self, result: Result) -> str:
        return "colored"


def results(path, as_json=False, highlighter=None, keep=0) -> LineFile:
    return LineFile(path, keep, text_lines(as_json, path is not None or as_json, highlighter))


# ---- where results go ----------------------------------------------------------------------------


def test_a_finished_result_is_written_at_once_on_one_line(tmp_path):
    """The old file stays unchanged until the first result is finished."""
    path = tmp_path / "out.txt"
    path.write_text("from yesterday")
    with results(str(path)) as file:
        assert path.read_text() == "from yesterday"
        file.write(Line("p"), result("one\ntwo\r\nthree"))
        assert path.read_text() == "one\\ntwo\\nthree\n"
        file.write(Line("q"), result(""))
    with results(str(path)):
        pass
    assert path.read_text() == "one\\ntwo\\nthree\n\n"


def test_a_file_that_can_no_longer_be_written_is_named(tmp_path):
    path = tmp_path / "out.txt"
    with results(str(path)) as file:
        file.write(Line("p"), result("one"))
        path.unlink()
        with pytest.raises(UserError, match="out.txt was removed while it was written"):
            file.write(Line("q"), result("two"))
    if Path("/dev/full").exists():
        path.symlink_to("/dev/full")
        full = pytest.raises(UserError, match="^cannot write .*out.txt: No space left.*; make room")
        with full, results(str(path)) as file:
            file.write(Line("p"), result("one"))
    with pytest.raises(UserError, match="out.txt: No such file or directory; name another"):
        results(str(tmp_path / "gone" / "out.txt")).write(Line("p"), result("one"))


def test_a_file_is_not_shared_or_continued_where_it_has_become_shorter(tmp_path):
    path = tmp_path / "out.txt"
    with results(str(path)) as file:
        file.write(Line("p"), result("one"))
        with pytest.raises(UserError, match="is being written by another process"):
            results(str(path)).write(Line("q"), result("two"))
    with pytest.raises(UserError, match="has become shorter"):
        results(str(path), keep=99).write(Line("p"), result("two"))
    assert path.read_text() == "one\n"


def test_a_whole_file_appears_when_it_is_complete(tmp_path, capsys):
    """A link still leads to it, and it keeps the old file's permissions."""
    path, link, partial = (tmp_path / name for name in ("out.txt", "link", ".partial-out.txt"))
    path.write_text("from yesterday")
    path.chmod(0o600)
    link.symlink_to(path)

    def write(end: Exception | None = None) -> None:
        with LineFile(str(link), whole=True) as file:
            file.write_text("one ")
            with pytest.raises(UserError, match="link is being written by another process"):
                LineFile(str(path.with_name("link")), whole=True).write_text("two")
            file.write_text("two")
            assert (path.read_text(), partial.read_text()) == ("from yesterday", "one two")
            if end:
                raise end

    with pytest.raises(ZeroDivisionError):
        write(ZeroDivisionError())
    assert capsys.readouterr().err == f"note: what was finished is in {partial}\n"
    write()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one two", 0o600)
    assert link.is_symlink() and not partial.exists() and not capsys.readouterr().err
    path.unlink()
    where = r"cannot rename .*\.partial-out\.txt: .*; copy it to another place"
    with pytest.raises(UserError, match=where), LineFile(str(link), whole=True) as file:
        file.write_text("three")
        path.mkdir()
    assert partial.read_text() == "three"


@pytest.mark.parametrize(
    "options, whole",
    [
        ("--prompt a --output-file b", True),
        ("--input-file a.txt --output-file b", False),
        ("--input-file - --output-file b", False),
        ("--input-file a.txt --split lines --output-file b", True),
        ("--input-file a.SRT --json --output-file b", True),
        ("--input-file a.srt --split none --output-file b", False),
        ("--input-file a.jsonl --split lines --output-file b", False),
        ("--input-file a.txt --embed --output-file b.npy", True),
        ("--prompt a --output-file /dev/null", False),
        ("--prompt a", False),
    ],
)
def test_what_cannot_be_resumed_appears_as_a_whole(options, whole):
    assert read_options(options.split())[0].is_output_whole == whole


def test_a_json_result_is_exact_even_if_colored(capsys):
    with results(None, as_json=True, highlighter=Colored()) as file:
        file.write(Line("p\u2028é"), result("one\ntwo"))
    out, err = capsys.readouterr()
    line, end = out.split("\n")
    record = json.loads(line)
    assert (end, err) == ("", "colored\n")
    assert (record["prompt"], record["text"]) == ("p\u2028é", "one\ntwo")


def test_colored_text_is_printed_but_not_written_to_files(capsys, tmp_path):
    for path in (None, str(tmp_path / "out.txt")):
        with results(path, highlighter=Colored()) as file:
            file.write(Line("p"), result("plain"))
    assert capsys.readouterr() == ("colored\n", "colored\n")
    assert (tmp_path / "out.txt").read_text() == "plain\n"


def test_a_prompt_without_a_result_keeps_its_place(tmp_path):
    outcomes = result("one"), result(None, error="no memory"), result("three")
    for name, as_json in (("out.txt", False), ("out.jsonl", True)):
        with results(str(tmp_path / name), as_json, highlighter=Colored()) as file:
            for outcome in outcomes:
                file.write(Line("prompt"), outcome)
    assert (tmp_path / "out.txt").read_text() == "one\n\nthree\n"
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == ["one", None, "three"]
    assert [record.get("error") for record in records] == [None, "no memory", None]


@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_each_row_of_an_array_belongs_to_its_prompt(tmp_path, capsys, end):
    """The file is replaced at the end, but only if there is a vector, and not after Ctrl-C."""
    path, rows = tmp_path / "vectors.npy", np.arange(6, dtype=np.float32).reshape(2, 3) / 7
    path.write_text("from earlier")
    with ArrayFile(str(path)) as output:
        output.write(Line("a prompt"), UserError("empty"))
    assert path.read_text() == "from earlier"
    try:
        with ArrayFile(str(path)) as output:
            for outcome in (UserError("empty"), rows[0], UserError("too long"), rows[1]):
                output.write(Line("a prompt"), outcome)
            if end:
                raise end
    except KeyboardInterrupt:
        assert path.read_text() == "from earlier"
        path = tmp_path / ".partial-vectors.npy"
        assert capsys.readouterr().err == f"note: what was finished is in {path}\n"
    array = np.load(path)
    assert (array.shape, array.dtype) == ((4, 3), np.float32) and np.isnan(array[[0, 2]]).all()
    assert np.array_equal(array[[1, 3]], rows)


# ---- origins of tokens ---------------------------------------------------------------------------


def test_every_token_is_marked_with_its_origin():
    origins = ["draft", "draft", "target", "copy"]
    highlighted = TokenHighlighter().highlight(["a", "", "b", "c"], origins, "\ufffd")
    marks = {32: "a", 35: "b", 36: "c"}
    expected = "".join(f"\033[{color}m{text}\033[0m" for color, text in marks.items())
    assert highlighted == expected + "\033[35m\ufffd\033[0m"


def test_a_colored_line_does_not_split_a_character():
    tokenizer = transformers.ByT5Tokenizer()
    tokens = tokenizer.encode("aé\n")[:-1]
    result = Result("aé\n", tokens, ["draft", "target", "draft", "target"], "stop", Stats())
    line = "\033[32ma\033[0m\033[32mé\033[0m\033[35m\\n\033[0m"
    assert TokenHighlighter(tokenizer).line(result) == line


def test_the_summary_adds_up():
    sums = DocumentStats()
    sums.add(STATS)
    sums.add(Stats(generated_tokens=10, target_calls=10, tokens_per_call=1.0))
    assert summary(sums, 2, 4.0) == (
        "2 prompts · 20 tokens in 4.00 s · 5.0 tokens/s · acceptance 50% (6 of 12 drafted) · "
        "1.43 tokens per target call · peak memory 2.50 GB"
    )
