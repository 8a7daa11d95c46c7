"""Tests benchmark.py's command line; the options of subcommands have tests of their own."""

import sys

import pytest

import benchmark
from benchmarks import compare


def test_the_program_has_all_subcommands(capsys):
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(["--help"])
    shown = capsys.readouterr().out
    for name in ("compare", "sweep", "peers", "server", "report"):
        assert f"\n    {name} " in shown


def test_ctrl_c_has_the_status_that_shells_expect(monkeypatch):
    def interrupted(args, command):
        assert command == "python benchmark.py compare --prompts 'my file'"
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run", interrupted)
    assert benchmark.main(["compare", "--prompts", "my file"]) == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "--model", "no/such/model"], "there is no model folder"),
        (["compare", "--prompts", "no-such-file"], "there is no file no-such-file"),
        (["compare", "--json", "no-such-folder/x.json"], "there is no folder"),
        (["compare", "--num-draft", "0"], "a whole number, at least 1"),
        (["compare", "--temp", "-1"], "0 (greedy), or a number"),
        (["compare", "--count", "x"], "a whole number, at least 2"),
        (["compare", "--count", "1001"], "there are 1000 held-out prompts of translate"),
        (["compare", "--ways", "x"], "invalid choice: 'x'"),
        (["sweep", "--delta", "1.5"], "a number from 0 (lossless) to 1, not '1.5'"),
        (["sweep", "--num-draft", "auto"], "a whole number, at least 1, not 'auto'"),
        (["sweep", "--output", "no-such-folder/x"], "there is no folder"),
        (["server", "--model", "no/such/folder"], "there is no model folder no/such/folder"),
        (["report", "--draft-model", "lookup"], "a report needs a draft model: name one with"),
        (["report", "--seconds", "0"], "a whole number, at least 1"),
        (["peers", "--pause", "61"], "a number from 0 to 60"),
        ([], "required: SUBCOMMAND"),
    ],
)
def test_mistakes_are_reported_in_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = benchmark.main(argv)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and error.startswith("error: ") and message in error


def test_a_missing_package_is_reported_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert benchmark.main(["sweep", "--output", str(tmp_path / "x")]) == 2
    error = "error: matplotlib is not installed; pip install -r requirements/benchmark.txt\n"
    assert capsys.readouterr().err == error
    assert list(tmp_path.iterdir()) == []
