"""Reading prompts and writing results, without any model."""

import io
import json
import os
import sys
import tracemalloc

import pytest

from fake_results import FakeResult
from mlx_t5.cli import input, output
from mlx_t5.errors import UserError


@pytest.fixture
def standard_input(monkeypatch):
    """Gives data to read there, through a pipe; the writer's end stays open if it is to `wait`."""
    opened = []

    def give(data: bytes, wait: bool = False) -> io.FileIO:
        reader, writer = os.pipe()
        opened.extend([open(reader), open(writer, "wb", buffering=0)])
        monkeypatch.setattr(sys, "stdin", opened[-2])
        opened[-1].write(data)
        if not wait:
            opened[-1].close()
        return opened[-1]

    yield give
    for file in reversed(opened):
        file.close()


def written(tmp_path, name: str, data: str | bytes) -> str:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


# ---- prompts -------------------------------------------------------------------------------------


def lines(name):
    """What `Lines` finds, errors as their message."""
    return [str(p) if isinstance(p, UserError) else p for p in input.Lines(name)]


def test_prompts_are_kept_as_given_and_in_order():
    assert input.read_prompts([" b ", "a"]) == [" b ", "a"]


def test_a_dash_is_the_whole_of_standard_input(standard_input):
    standard_input("First line.\nSecond, é.\r\n".encode())
    assert input.read_prompts(["before", "-"]) == ["before", "First line.\nSecond, é."]


def test_an_input_file_has_one_prompt_a_line(tmp_path):
    name = written(tmp_path, "p.txt", "\ufeffone\r\ntwo\u2028still two\n\n \n")
    assert lines(name) == ["one", "two\u2028still two"]
    assert input.Lines(name).count == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_ends_as_any_system_ends_it(tmp_path, end):
    name = written(tmp_path, "p.txt", end.join(["one", "", "tw\x85o", "thrèè", ""]))
    empty = f"{name} line 2 is empty; write what the model is to work on"
    assert lines(name) == ["one", empty, "tw\x85o", "thrèè"]
    assert input.Lines(name).count == 4


def test_an_input_file_named_dash_is_standard_input(standard_input):
    standard_input(b"one\ntwo\n")
    assert lines("-") == ["one", "two"]
    assert not sys.stdin.closed


def test_only_what_can_be_read_twice_is_counted(standard_input, tmp_path, monkeypatch):
    standard_input(b"one\ntwo\n")
    piped = input.Lines(f"/dev/fd/{sys.stdin.fileno()}")  # as <(command) and /dev/stdin are
    assert (piped.count, list(piped)) == (None, ["one", "two"])
    with open(written(tmp_path, "p.txt", "one\ntwo\nthree\n")) as file:
        assert file.readline() == "one\n"
        os.lseek(file.fileno(), 4, os.SEEK_SET)  # `read` in a shell has taken a line
        monkeypatch.setattr(sys, "stdin", file)
        redirected = input.Lines("-")
        assert (redirected.count, list(redirected)) == (2, ["two", "three"])


def test_a_pipe_has_its_first_line_before_it_has_its_last(standard_input):
    writer = standard_input(b"first\n", wait=True)
    reader = input.Lines("-")
    assert next(reader) == "first"
    assert not reader.ready()
    writer.write(b"second\n")
    assert next(reader) == "second"
    writer.write(b"third, without an end")
    writer.close()
    assert next(reader) == "third, without an end"
    with pytest.raises(StopIteration):
        next(reader)
    assert reader.ready(), "the end need not be waited for"


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    name = written(tmp_path, "p.txt", b"a line of some length\n" * 20_000)
    tracemalloc.start()
    try:
        found = input.Lines(name)
        assert (found.count, next(found)) == (20_000, "a line of some length")
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_jsonl_prompts_may_hold_line_breaks(tmp_path):
    name = written(tmp_path, "p.jsonl", '{"prompt": "a\\nb", "id": 7}\n{"prompt": "{}"}')
    assert lines(name) == ["a\nb", "{}"]


@pytest.mark.parametrize(
    ("name", "data", "bad", "message", "others"),
    [
        ("p.txt", "one\n\nthree\nfour\n", 2, "is empty", ["one", "three", "four"]),
        ("p.txt", "\nthree\n \n", 1, "is empty", ["three"]),
        ("p.txt", b"one\ntwo\n\xe9t\xe9\n", 3, "is not UTF-8", ["one", "two"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}', 2, "is not JSON", ["a", "b"]),
        ("p.jsonl", "[" * 100_000 + '\n{"prompt": "b"}', 1, "is JSON that cannot be read", ["b"]),
        ("p.jsonl", f'{{"a": {"1" * 5000}}}\n{{"prompt": "b"}}', 1, "is JSON that cannot", ["b"]),
        ("p.jsonl", '"a"\n', 1, "has no prompt", []),
        ("p.jsonl", '{"text": "a"}\n', 1, "has no prompt", []),
        ("p.jsonl", '{"prompt": 3}\n', 1, "has no prompt", []),
        ("p.jsonl", '{"prompt": " "}\n', 1, "is empty", []),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', 1, "is not valid Unicode", []),
    ],
)
def test_a_bad_line_has_its_reason_and_the_others_are_read(
    tmp_path, name, data, bad, message, others
):
    path = written(tmp_path, name, data)
    found = list(input.Lines(path))
    error = found.pop(bad - 1)
    assert isinstance(error, UserError)
    assert str(error).startswith(f"{path} line {bad} {message}")
    assert "\n" not in str(error)
    assert found == others
    assert input.Lines(path).count == len(others) + 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_a_file_in_utf_16_is_refused_line_by_line(tmp_path, encoding):
    name = written(tmp_path, "p.txt", "one\ntwo\n".encode(encoding))
    for n, error in enumerate(lines(name), 1):
        assert error == f"{name} line {n} is not UTF-8; save the text as UTF-8"


@pytest.mark.parametrize("data", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, data, standard_input):
    name = written(tmp_path, "p.txt", data)
    with pytest.raises(UserError, match=f"{name} is empty"):
        input.Lines(name)
    standard_input(data.encode())
    with pytest.raises(UserError, match="standard input is empty"):
        lines("-")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="there is no file .*none.txt"):
        input.Lines(str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="cannot read"):
        input.Lines(str(tmp_path))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt, standard_input):
    standard_input(prompt.encode())
    with pytest.raises(UserError, match="the prompt is empty"):
        input.read_prompts([prompt])
    with pytest.raises(UserError, match="standard input is empty"):
        input.read_prompts(["-"])


def test_bytes_that_are_no_text_are_refused_on_the_command_line():
    with pytest.raises(UserError, match="not valid Unicode"):
        input.read_prompts([b"caf\xe9".decode("utf-8", "surrogateescape")])


# ---- where results go ----------------------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    name = written(tmp_path, "p.txt", "one\n")
    with pytest.raises(UserError, match="is a folder"):
        output.check_output_file(str(tmp_path), None)
    with pytest.raises(UserError, match="there is no folder"):
        output.check_output_file(str(tmp_path / "none" / "out.txt"), None)
    with pytest.raises(UserError, match="is the input file too"):
        output.check_output_file(str(tmp_path / "." / "p.txt"), name)
    output.check_output_file(str(tmp_path / "out.txt"), name)
    assert not (tmp_path / "out.txt").exists()


def test_plain_results_take_one_line_each(tmp_path):
    path = tmp_path / "out.txt"
    with output.Results(str(path), as_json=False, paint=None) as results:
        results.write("p", FakeResult("one\ntwo\r\nthree"))
        assert path.read_text() == "one\\ntwo\\nthree\n", "a finished result is on disk at once"
        results.write("q", FakeResult(""))
    assert path.read_text() == "one\\ntwo\\nthree\n\n"


def test_a_file_is_left_as_it_is_until_there_is_a_result(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("from yesterday")
    with output.Results(str(path), as_json=False) as results:
        assert path.read_text() == "from yesterday"
        results.write("p", FakeResult("new"))
    assert path.read_text() == "new\n"
    with output.Results(str(path), as_json=False):
        pass
    assert path.read_text() == "new\n"


def test_json_results_are_exact(capsys):
    with output.Results(None, as_json=True, paint=None) as results:
        results.write("p\u2028é", FakeResult("one\ntwo"))
    line, end = capsys.readouterr().out.split("\n")
    assert end == ""
    record = json.loads(line)
    assert list(record) == ["prompt", "text", "tokens", "finish_reason", "stats"]
    assert (record["prompt"], record["text"]) == ("p\u2028é", "one\ntwo")
    assert record["stats"]["drafted"] == 12


def test_coloured_json_stays_json(capsys):
    with output.Results(None, as_json=True, paint=lambda result: "coloured") as results:
        results.write("p", FakeResult("plain"))
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == "plain"
    assert err == "coloured\n"


def test_coloured_text_takes_the_place_of_the_text_unless_it_is_for_a_file(capsys, tmp_path):
    for path in (None, str(tmp_path / "out.txt")):
        with output.Results(path, as_json=False, paint=lambda result: "coloured") as results:
            results.write("p", FakeResult("plain"))
    assert capsys.readouterr() == ("coloured\n", "coloured\n")
    assert (tmp_path / "out.txt").read_text() == "plain\n"


def test_a_prompt_without_a_result_keeps_its_place(tmp_path):
    failed = FakeResult(None, [], [], "error", error="no memory")
    for name, as_json in (("out.txt", False), ("out.jsonl", True)):
        path = tmp_path / name
        with output.Results(str(path), as_json, paint=lambda result: result.text) as results:
            for result in (FakeResult("one"), failed, FakeResult("three")):
                results.write("prompt", result)
        lines = path.read_text().split("\n")[:-1]
        if as_json:
            records = [json.loads(line) for line in lines]
            assert [record["text"] for record in records] == ["one", None, "three"]
            assert [record.get("error") for record in records] == [None, "no memory", None]
        else:
            assert lines == ["one", "", "three"]


# ---- who wrote what ------------------------------------------------------------------------------


def test_every_token_has_its_author():
    painter = output.Painter(no_color=True)
    writers = ["draft", "target", "copy", "copy"]
    assert painter.paint(["Le", " chat", "", "s"], writers) == "[Le] chat{s}"
    assert painter.paint(["Le"], ["draft"], "\ufffd") == "[Le]\ufffd"


def test_colours_are_turned_off_after_every_token():
    writers = ["draft", "target", "copy"]
    painted = output.Painter(no_color=False).paint(["a", "b", "c"], writers)
    assert painted == "\033[32ma\033[0m\033[35mb\033[0m\033[36mc\033[0m"


def test_a_coloured_line_does_not_split_a_character():
    class Bytes:
        """Two tokens make one character, as in ByT5."""

        held = 0

        def add(self, tokens: list[int]) -> str:
            self.held += len(tokens)
            return "é" if self.held == 2 else ""

        def finish(self) -> str:
            return "\n"

    line = output.Painter(no_color=True).line(FakeResult("é\n"), Bytes())
    assert line == "é\\n"
