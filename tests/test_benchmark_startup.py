"""`startup`: when its clock stops, what it refuses, and a run, not judged by its speed."""

import json
import os
import sys

import pytest

from backend import UserError
from benchmarks import command_line, startup
from benchmarks.startup import COMMANDS, seconds


def program(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, pathlib, sys, time\n{code}"]


def test_the_clock_stops_when_something_is_shown(tmp_path):
    code = "print('read', end='', flush=True)\nprint('y', flush=True)\n"
    wait = "time.sleep(60)\npathlib.Path('late').touch()"
    assert seconds(program(code + wait), rb"ready", str(tmp_path)) > 0
    assert not (tmp_path / "late").exists()


def test_the_clock_stops_when_the_program_has_ended(tmp_path):
    code = "print('usage', flush=True)\nos.close(1)\nos.close(2)\ntime.sleep(0.3)\n"
    code += "pathlib.Path('late').touch()"
    assert seconds(program(code), None, str(tmp_path)) > 0
    assert (tmp_path / "late").exists()


@pytest.mark.parametrize("shown", [None, rb"ready"])
def test_a_program_that_fails_is_told(tmp_path, shown):
    with pytest.raises(UserError, match="did not start: no models here$"):
        seconds(program("print('first')\nsys.exit('error: no models here')"), shown, str(tmp_path))


def test_a_program_that_never_shows_it_is_told(tmp_path):
    with pytest.raises(UserError, match="did not start: something else$"):
        seconds(program("print('something else')"), rb"ready", str(tmp_path))


def test_every_file_is_forgotten(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("1")
    (tmp_path / "c.py").write_text("2")
    asked = []
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)

    def advise(file, start, length, advice):
        asked.append((os.pread(file, 1, 0), start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    startup.forget([tmp_path])
    assert sorted(asked) == [(b"1", 0, 0, 4), (b"2", 0, 0, 4)]


def test_what_cannot_be_measured_is_one_line(monkeypatch, capsys):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert command_line.main(["startup", "--cold"]) == 2
    assert command_line.main(["startup", "--python", "no/such/python"]) == 2
    cold, python = capsys.readouterr().err.splitlines()
    assert cold.startswith("error: --cold: this system cannot be told")
    assert python.startswith("error: --python no/such/python: No such file")


def test_a_run_has_a_column_for_every_interpreter(tmp_path, capsys):
    file, other = tmp_path / "figures.json", tmp_path / "python"
    other.symlink_to(sys.executable)
    ways = ["--python", sys.executable, str(other), "--command", "benchmark.py --help"]
    argv = ["startup", *ways, "--repeats", "1", "--json", str(file)]
    assert command_line.main(argv) == 0
    command, head, _, _, titles, _, row = capsys.readouterr().out.splitlines()
    assert command.startswith("python benchmark.py startup") and "mlx" in head
    assert titles == f"|  | {sys.executable} | {other} |"
    assert row.startswith("| benchmark.py --help | ")
    runs = json.loads(file.read_text())["runs"]
    assert [run["python"] for run in runs] == [sys.executable, str(other)]
    assert all(len(run["seconds"]) == 1 for run in runs)


def test_main_is_stopped_by_the_text_itself(tmp_path):
    """Not by what it says before on standard error."""
    shown = COMMANDS["main.py"]
    said = "print('target a, draft b')\nprint('prompt: translate', flush=True)\n"
    with pytest.raises(UserError):
        seconds(program(said), shown, str(tmp_path))
    assert seconds(program(said + "print('Allons')"), shown, str(tmp_path)) > 0
