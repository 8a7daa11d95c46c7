"""Reading prompts and writing results, without any model."""

import io
import json
import sys
from dataclasses import dataclass, field

import pytest

import console
from console import InputError


@dataclass
class FakeSpeculation:
    copied_accepted: int = 0


@dataclass
class FakeStats:
    prompt_tokens: int = 3
    generated_tokens: int = 10
    target_calls: int = 4
    drafted: int = 12
    accepted: int = 6
    tokens_per_call: float = 2.5
    peak_memory_bytes: int = 2_500_000_000
    speculation: FakeSpeculation = field(default_factory=FakeSpeculation)


@dataclass
class FakeResult:
    text: str
    tokens: list[int] = field(default_factory=lambda: [5, 6])
    writers: list[str] = field(default_factory=lambda: ["draft", "target"])
    finish_reason: str = "stop"
    stats: FakeStats = field(default_factory=FakeStats)
    error: str | None = None


@pytest.fixture
def standard_input(monkeypatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def written(tmp_path, name: str, data: str | bytes) -> str:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


# ---- prompts -------------------------------------------------------------------------------------


def lines(name):
    """What `read_lines` finds, errors as their message."""
    return [str(p) if isinstance(p, InputError) else p for p in console.read_lines(name)]


def test_prompts_are_kept_as_given_and_in_order():
    assert console.read_prompts([" b ", "a"]) == [" b ", "a"]


def test_a_dash_is_the_whole_of_standard_input(standard_input):
    standard_input("First line.\nSecond, é.\r\n".encode())
    assert console.read_prompts(["before", "-"]) == ["before", "First line.\nSecond, é."]


def test_an_input_file_has_one_prompt_a_line(tmp_path):
    name = written(tmp_path, "p.txt", "\ufeffone\r\ntwo\u2028still two\n\n \n")
    assert lines(name) == ["one", "two\u2028still two"]
    assert console.count_lines(name) == 2


def test_an_input_file_named_dash_is_standard_input(standard_input):
    standard_input(b"one\ntwo\n")
    assert console.count_lines("-") is None
    assert lines("-") == ["one", "two"]
    assert not sys.stdin.closed


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    def endless():
        yield b"first\n"
        yield b"second\n"
        raise AssertionError("read ahead")

    class Stream:
        buffer = endless()

    before, sys.stdin = sys.stdin, Stream()
    try:
        reader = console.read_lines("-")
        assert [next(reader), next(reader)] == ["first", "second"]
        with pytest.raises(AssertionError, match="read ahead"):
            next(reader)
    finally:
        sys.stdin = before


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
    found = list(console.read_lines(path))
    error = found.pop(bad - 1)
    assert isinstance(error, InputError)
    assert str(error).startswith(f"{path} line {bad} {message}")
    assert "\n" not in str(error)
    assert found == others
    assert console.count_lines(path) == len(others) + 1


@pytest.mark.parametrize("data", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, data, standard_input):
    name = written(tmp_path, "p.txt", data)
    with pytest.raises(InputError, match=f"{name} is empty"):
        console.count_lines(name)
    standard_input(data.encode())
    with pytest.raises(InputError, match="standard input is empty"):
        lines("-")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="there is no file .*none.txt"):
        console.count_lines(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="cannot read"):
        console.count_lines(str(tmp_path))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt, standard_input):
    standard_input(prompt.encode())
    with pytest.raises(InputError, match="the prompt is empty"):
        console.read_prompts([prompt])
    with pytest.raises(InputError, match="standard input is empty"):
        console.read_prompts(["-"])


def test_bytes_that_are_no_text_are_refused_on_the_command_line():
    with pytest.raises(InputError, match="not valid Unicode"):
        console.read_prompts([b"caf\xe9".decode("utf-8", "surrogateescape")])


# ---- where results go ----------------------------------------------------------------------------


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    name = written(tmp_path, "p.txt", "one\n")
    with pytest.raises(InputError, match="is a folder"):
        console.check_output(str(tmp_path), None)
    with pytest.raises(InputError, match="there is no folder"):
        console.check_output(str(tmp_path / "none" / "out.txt"), None)
    with pytest.raises(InputError, match="is the input file too"):
        console.check_output(str(tmp_path / "." / "p.txt"), name)
    console.check_output(str(tmp_path / "out.txt"), name)
    assert not (tmp_path / "out.txt").exists()


def test_plain_results_take_one_line_each(tmp_path):
    path = tmp_path / "out.txt"
    with console.Results(str(path), as_json=False, paint=None) as results:
        results.write("p", FakeResult("one\ntwo\r\nthree"))
        assert path.read_text() == "one\\ntwo\\nthree\n", "a finished result is on disk at once"
        results.write("q", FakeResult(""))
    assert path.read_text() == "one\\ntwo\\nthree\n\n"


def test_a_file_is_left_as_it_is_until_there_is_a_result(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("from yesterday")
    with console.Results(str(path), as_json=False) as output:
        assert path.read_text() == "from yesterday"
        output.write("p", FakeResult("new"))
    assert path.read_text() == "new\n"
    with console.Results(str(path), as_json=False):
        pass
    assert path.read_text() == "new\n"


def test_json_results_are_exact(capsys):
    with console.Results(None, as_json=True, paint=None) as results:
        results.write("p\u2028é", FakeResult("one\ntwo"))
    line, end = capsys.readouterr().out.split("\n")
    assert end == ""
    record = json.loads(line)
    assert list(record) == ["prompt", "text", "tokens", "finish_reason", "stats"]
    assert (record["prompt"], record["text"]) == ("p\u2028é", "one\ntwo")
    assert record["stats"]["drafted"] == 12


def test_coloured_json_stays_json(capsys):
    with console.Results(None, as_json=True, paint=lambda result: "coloured") as results:
        results.write("p", FakeResult("plain"))
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == "plain"
    assert err == "coloured\n"


def test_coloured_text_takes_the_place_of_the_text_unless_it_is_for_a_file(capsys, tmp_path):
    for path in (None, str(tmp_path / "out.txt")):
        with console.Results(path, as_json=False, paint=lambda result: "coloured") as results:
            results.write("p", FakeResult("plain"))
    assert capsys.readouterr() == ("coloured\n", "coloured\n")
    assert (tmp_path / "out.txt").read_text() == "plain\n"


# ---- who wrote what ------------------------------------------------------------------------------


def test_every_token_has_its_author():
    painter = console.Painter(no_color=True)
    writers = ["draft", "target", "copy", "copy"]
    assert painter.paint(["Le", " chat", "", "s"], writers) == "[Le] chat{s}"
    assert painter.paint(["Le"], ["draft"], "\ufffd") == "[Le]\ufffd"


def test_colours_are_turned_off_after_every_token():
    writers = ["draft", "target", "copy"]
    painted = console.Painter(no_color=False).paint(["a", "b", "c"], writers)
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

    line = console.Painter(no_color=True).line(FakeResult("é\n"), Bytes())
    assert line == "é\\n"


# ---- statistics ----------------------------------------------------------------------------------


def test_the_summary_of_one_text():
    assert console.summary([FakeStats()], 2.0) == (
        "10 tokens in 2.00 s · 5.0 tokens/s · acceptance 50% (6 of 12 drafted) · "
        "2.50 tokens per target call · peak memory 2.50 GB"
    )


def test_the_summary_adds_up_and_leaves_out_what_did_not_happen():
    regular = FakeStats(
        target_calls=10, drafted=0, accepted=0, tokens_per_call=1.0, peak_memory_bytes=0
    )
    line = console.summary([FakeStats(), regular], 4.0)
    assert line.startswith("2 prompts · 20 tokens in 4.00 s · 5.0 tokens/s")
    assert "1.43 tokens per target call" in line
    assert "peak memory 2.50 GB" in line
    assert "acceptance" not in console.summary([regular], 1.0)
    assert "tokens per target call" not in console.summary([], 0.0)


def test_a_prompt_without_a_result_keeps_its_place(tmp_path):
    failed = FakeResult(None, [], [], "error", error="no memory")
    for name, as_json in (("out.txt", False), ("out.jsonl", True)):
        path = tmp_path / name
        with console.Results(str(path), as_json, paint=lambda result: result.text) as results:
            for result in (FakeResult("one"), failed, FakeResult("three")):
                results.write("prompt", result)
        lines = path.read_text().split("\n")[:-1]
        if as_json:
            records = [json.loads(line) for line in lines]
            assert [record["text"] for record in records] == ["one", None, "three"]
            assert [record.get("error") for record in records] == [None, "no memory", None]
        else:
            assert lines == ["one", "", "three"]
