"""The command line itself; each subcommand's own options are tested with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import command_line, compare

ROOT = Path(command_line.__file__).resolve().parents[1]


def test_the_program_has_all_subcommands():
    shown = subprocess.run(
        [sys.executable, str(ROOT / "benchmark.py"), "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    for name in ("compare", "sweep", "peers", "quantize", "memory", "server"):
        assert f"\n    {name} " in shown.stdout


def test_ctrl_c_has_the_status_that_shells_expect(monkeypatch):
    def interrupted(args, command):
        assert command == "python benchmark.py compare --count 3"
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run", interrupted)
    assert command_line.main(["compare", "--count", "3"]) == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare", "--model", "no/such/model"], "there is no model folder"),
        (["compare", "--prompts", "no-such-file"], "there is no file no-such-file"),
        (["compare", "--json", "no-such-folder/x.json"], "there is no folder"),
        (["compare", "--num-draft", "0"], "give a whole number, at least 1"),
        (["compare", "--temp", "-1"], "give 0 (greedy), or a number"),
        (["compare", "--count", "x"], "give a whole number, at least 2"),
        (["compare", "--count", "1001"], "there are 1000 held-out prompts of translate"),
        (["compare", "--ways", "x"], "invalid choice: 'x'"),
        (["sweep", "--delta", "1.5"], "give a number from 0 (lossless) to 1, not '1.5'"),
        (["sweep", "--num-draft", "auto"], "give a whole number, at least 1, not 'auto'"),
        ([], "required: SUBCOMMAND"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    try:
        status = command_line.main(argv)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and message in error
    assert error.startswith("error: ") and error.count("\n") == 1
