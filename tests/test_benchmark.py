"""Tests benchmark.py's command line."""

import pytest

import benchmark


def test_the_program_has_all_subcommands(capsys):
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(["--help"])
    shown = capsys.readouterr().out
    for name in ("compare", "sweep", "peers", "server", "report"):
        assert f"\n    {name} " in shown


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("compare --model no/such/model", "no/such/model"),
        ("compare --prompts no-such-file", "no-such-file"),
        ("compare --json no-such-folder/x.json", "no-such-folder"),
        ("compare --num-draft 0", "--num-draft"),
        ("compare --count 1001", "1000 held-out prompts"),
        ("compare --ways x", "--ways"),
        ("sweep --delta 1.5", "--delta"),
        ("sweep --output no-such-folder/x", "no-such-folder"),
        ("server --model no/such/folder", "no/such/folder"),
        ("report --draft-model lookup", "--draft-model"),
        ("peers --count 1", "--count"),
    ],
)
def test_mistakes_are_reported_in_one_line(argv, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = benchmark.main(argv.split())
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and error.startswith("error: ") and named in error
