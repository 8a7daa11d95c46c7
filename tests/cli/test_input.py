"""Prompts are read from the command line, a file or a pipe, as they are needed."""

import io
import os
import sys
import time

import pytest

from mlx_t5.cli import input
from mlx_t5.cli.input import ReadAhead
from mlx_t5.errors import UserError


@pytest.fixture
def standard_input(monkeypatch):
    """Returns `give(data, wait)`, which pipes data to stdin; `wait` keeps the pipe open."""
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


def lines(name, **how):
    """Returns the prompts that are read, and the messages of errors."""
    return [str(line.source) for line in input.LineReader(name, **how).lines()]


def test_prompts_are_as_given_and_a_dash_is_all_of_standard_input(standard_input):
    standard_input("First line.\nSecond, é.\r\n".encode())
    read = input.read_prompts([" b ", "-", "a"])
    assert [line.text for line in read] == [" b ", "First line.\nSecond, é.", "a"]


def test_an_input_file_has_one_prompt_a_line(tmp_path):
    name = written(tmp_path, "p.txt", "\ufeffone\r\ntwo\u2028still two\n\n \n")
    assert lines(name) == ["one", "two\u2028still two"]
    assert input.LineReader(name).lines().count == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_ends_as_any_system_ends_it(tmp_path, end):
    name = written(tmp_path, "p.txt", end.join(["one", "", "tw\x85o", "thrèè", ""]))
    empty = f"{name} line 2 is empty; write what the model is to work on"
    assert lines(name) == ["one", empty, "tw\x85o", "thrèè"]
    assert input.LineReader(name).lines().count == 4


def test_only_input_that_can_be_read_twice_is_counted(standard_input, tmp_path, monkeypatch):
    standard_input(b"one\ntwo\n")
    # Like <(command) and /dev/stdin.
    piped = input.LineReader(f"/dev/fd/{sys.stdin.fileno()}").lines()
    assert (piped.count, [line.text for line in piped]) == (None, ["one", "two"])
    with open(written(tmp_path, "p.txt", "one\ntwo\nthree\n")) as file:
        assert file.readline() == "one\n"
        os.lseek(file.fileno(), 4, os.SEEK_SET)  # as after `read` in a shell, which consumes a line
        monkeypatch.setattr(sys, "stdin", file)
        redirected = input.LineReader("-").lines()
        assert (redirected.count, [line.text for line in redirected]) == (2, ["two", "three"])


def test_a_completion_is_scored_like_a_target(tmp_path):
    pairs = '{"prompt": "a", "completion": "b", "id": 1}\n{"prompt": "c", "target": "d"}\n{}'
    first, second, bad = input.LineReader(written(tmp_path, "p.jsonl", pairs), targets=True).lines()
    assert [first.pair, second.pair] == [("a", "b"), ("c", "d")] and first.fields == {"id": 1}
    assert "line 3 has no prompt; write " in str(bad.source)


def test_a_pipe_has_its_first_line_before_it_has_its_last(standard_input):
    writer = standard_input(b"first\n", wait=True)
    reader = input.LineReader("-").lines()
    assert next(reader).text == "first"
    assert not reader.ready()
    writer.write(b"second\n")
    assert next(reader).text == "second"
    writer.write(b"third, without an end")
    writer.close()
    assert next(reader).text == "third, without an end"
    with pytest.raises(StopIteration):
        next(reader)
    assert reader.ready(), "the end need not be waited for"
    assert not sys.stdin.closed


def test_jsonl_prompts_may_hold_line_breaks(tmp_path):
    name = written(tmp_path, "p.jsonl", '{"prompt": "a\\nb", "id": 7}\n{"prompt": "{}"}')
    assert lines(name) == ["a\nb", "{}"]


def test_lines_may_have_a_prediction(tmp_path):
    records = ["", ', "prediction": "B\\n"', ', "prediction": null', ', "prediction": 5']
    records += [', "prediction": " "', ', "prediction": "\\ud800"']
    data = "".join(f'{{"prompt": "{n}"{record}}}\n' for n, record in enumerate(records))
    name = written(tmp_path, "p.jsonl", data)
    items = list(input.LineReader(name, optional="prediction").lines())
    assert [item.prediction for item in items[:3]] == [None, "B\n", None]
    assert [item.index for item in items] == list(range(6))
    reasons = "line 4 has a prediction", "line 5 has a prediction", "line 6 is not valid Unicode"
    assert all(reason in str(item.source) for item, reason in zip(items[3:], reasons, strict=True))
    assert lines(name) == list("012345"), "where nothing is proposed the key is not looked at"


@pytest.mark.parametrize(
    ("name", "data", "bad", "message", "other_prompts"),
    [
        ("p.txt", "one\n\nthree\nfour\n", 2, "is empty", ["one", "three", "four"]),
        ("p.txt", b"one\ntwo\n\xe9t\xe9\n", 3, "is not UTF-8", ["one", "two"]),
        ("p.txt", "é".encode("utf-16-le"), 1, "is not UTF-8; save the text as UTF-8", []),
        ("p.txt", f"one\n{'x' * 3_000_000}\nthree\n", 2, "is longer than 1 MiB", ["one", "three"]),
        ("p.txt", f"one\n{'x' * (2**20 + 1)}", 2, "is longer than 1 MiB", ["one"]),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}', 2, "is not JSON", ["a", "b"]),
        ("p.jsonl", "[" * 100_000 + '\n{"prompt": "b"}', 1, "is JSON that cannot be read", ["b"]),
        ("p.jsonl", f'{{"a": {"1" * 5000}}}\n{{"prompt": "b"}}', 1, "is JSON that cannot", ["b"]),
        ("p.jsonl", '{"prompt": 3}\n', 1, "has no prompt", []),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', 1, "is not valid Unicode", []),
    ],
)
def test_a_bad_line_has_its_reason_and_other_lines_are_read(
    tmp_path, name, data, bad, message, other_prompts
):
    path = written(tmp_path, name, data)
    items = list(input.LineReader(path).lines())
    error = items.pop(bad - 1).source
    assert isinstance(error, UserError)
    assert str(error).startswith(f"{path} line {bad} {message}")
    assert "\n" not in str(error)
    assert [item.text for item in items] == other_prompts
    assert input.LineReader(path).lines().count == len(other_prompts) + 1


def test_a_prompt_may_be_empty_where_that_is_allowed(tmp_path):
    """A blank line between JSON lines is no prompt."""
    items = input.LineReader(written(tmp_path, "p.txt", "a\n \nb"), blank=True).lines()
    assert [item.source for item in items] == ["a", "", "b"]
    name = written(tmp_path, "p.jsonl", '{"prompt": ""}\n\n{"prompt": "b"}')
    sources = [item.source for item in input.LineReader(name, blank=True).lines()]
    assert (sources[0], sources[2]) == ("", "b") and "line 2 is empty" in str(sources[1])
    assert [line.source for line in input.read_prompts(["", "a"], blank=True)] == ["", "a"]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-be", "utf-7", "UTF-8"])
def test_an_encoding_may_be_named(tmp_path, standard_input, encoding):
    data = "one\r\nthrèè\n".encode(encoding)
    name = written(tmp_path, "p.txt", data)
    assert input.LineReader(name, encoding=encoding).lines().count == 2
    standard_input(data)
    for source in (name, "-"):
        assert lines(source, encoding=encoding) == ["one", "thrèè"]
    name = written(tmp_path, "p.jsonl", '{"prompt": "天气"}\n'.encode("gb18030"))
    assert lines(name, encoding="gb18030") == ["天气"]
    for wrong in "gb18030", "ascii":
        name = written(tmp_path, "p.txt", b"one\n\xe9t\xe9\xff\n")
        message = f"p.txt is not {wrong.upper()}; save the text as UTF-8, or name its encoding"
        with pytest.raises(UserError, match=message):
            input.LineReader(name, encoding=wrong).lines()


@pytest.mark.parametrize("data", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, data, standard_input):
    name = written(tmp_path, "p.txt", data)
    with pytest.raises(UserError, match=f"{name} is empty"):
        input.LineReader(name).lines()
    standard_input(data.encode())
    with pytest.raises(UserError, match="standard input is empty"):
        lines("-")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("  \n", "empty"), ("caf\udce9", "not valid Unicode"), ("-", "empty")],  # not UTF-8
)
def test_empty_and_undecodable_prompts_are_refused(prompt, reason, standard_input):
    standard_input(b" \n")
    with pytest.raises(UserError, match=f"(the prompt|standard input) is {reason}"):
        input.read_prompts([prompt])


# ---- reading ahead -------------------------------------------------------------------------------


def test_a_bounded_number_of_items_is_read_ahead():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    reader = ReadAhead(endless(), ahead=3)
    assert [next(reader) for _ in range(10)] == list(range(10))
    time.sleep(0.05)
    assert len(drawn) <= 14  # three wait, and the reader holds one more


def test_an_exception_is_raised_in_place_of_the_missing_item():
    def failing():
        yield 1
        raise OSError("gone")

    reader = ReadAhead(failing())
    assert next(reader) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(reader)
