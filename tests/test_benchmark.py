"""Tests benchmark.py's command line."""

import pytest

import benchmark
from mlx_t5.benchmarks import compare
from mlx_t5.disk import BUNDLED


def test_the_program_has_all_subcommands(capsys):
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(["--help"])
    shown = capsys.readouterr().out
    for name in ("compare", "sweep", "peers", "server", "report"):
        assert f"\n    {name} " in shown


def test_without_a_subcommand_the_draft_is_compared(monkeypatch):
    ran = []
    monkeypatch.setattr(
        compare, "run_compare", lambda args, command: ran.append((args, command)) or 0
    )
    assert benchmark.main([]) == benchmark.main(["--count", "2"]) == 0
    (args, command), (other, _) = ran
    assert (args.ways, args.num_draft, args.count) == (["draft"], [5, "auto"], 8)
    assert command == "python benchmark.py compare --ways draft --num-draft 5 auto"
    assert other.count == 2 and other.model == args.model == str(BUNDLED / "target")


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
        ("--count x", "--count"),
        ("comparison", "SUBCOMMAND"),
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
