"""Tests output_folder.py: an output folder appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpoints import siblings
from mlx_t5.checkpoints import output_folder
from mlx_t5.checkpoints.output_folder import check_output_folder, new_folder
from mlx_t5.errors import UserError


@pytest.fixture
def ended() -> int:
    """Returns the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="made in the meantime"), new_folder(out, overwrite=False):
        out.mkdir()
        (out / "theirs").touch()
    assert siblings(out) == {"out"} and (out / "theirs").exists()


def test_check_output_folder_refuses_a_dangling_link(tmp_path):
    check_output_folder(tmp_path / "none", overwrite=False, is_output=lambda name: False)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(UserError):
        check_output_folder(tmp_path / "dangling", overwrite=True, is_output=lambda name: True)


def test_leftovers_are_cleared_by_a_run_that_is_refused_too(tmp_path, ended):
    out = tmp_path / "out"
    for name in (f".out.old-{ended}", f".out.partial-{ended}"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="exists; replace it"):
        check_output_folder(out, overwrite=False, is_output=lambda name: True)
    assert siblings(out) == {"out"}


def test_leftovers_of_killed_runs_are_cleared(tmp_path, ended):
    for pid in (ended, os.getppid()):
        (tmp_path / f".out.partial-{pid}").mkdir()
    (tmp_path / f".other.partial-{ended}").mkdir()
    with new_folder(tmp_path / "out", overwrite=False) as partial:
        (partial / "config.json").touch()
    running = f".out.partial-{os.getppid()}"
    assert siblings(tmp_path / "out") == {"out", running, f".other.partial-{ended}"}


def test_a_folder_set_aside_by_a_killed_run_is_put_back(tmp_path, ended):
    aside = tmp_path / f".out.old-{ended}"
    aside.mkdir()
    (aside / "config.json").write_text("old")
    with (
        pytest.raises(UserError, match="exists, put back"),
        new_folder(tmp_path / "out", overwrite=False),
    ):
        pass
    assert siblings(tmp_path / "out") == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    with new_folder(tmp_path / "out", overwrite=True) as partial:
        (partial / "config.json").write_text("new")
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def folder_with(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(content)
    return path


def replace(out: Path) -> None:
    with new_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text("new")


@pytest.mark.parametrize("last", (1, 2))
def test_an_interrupt_right_after_renaming_restores_the_old_folder(tmp_path, monkeypatch, last):
    out, rename, done = folder_with(tmp_path / "out", "old"), Path.rename, []

    def interrupted(self: Path, target: Path) -> None:
        rename(self, target)
        done.append(target)
        if len(done) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(out)
    assert siblings(out) == {"out"} and (out / "config.json").read_text() == "old"


def test_an_interrupt_at_any_point_loses_nothing(tmp_path):
    """Interrupts every instruction of output_folder.py in turn, each time that it is reached."""
    interrupts, stop = [], 0
    while len(interrupts) == stop:  # one round for each instruction that is reached
        (place := tmp_path / str(stop)).mkdir()
        out, reached = folder_with(place / "out", "old"), 0

        def trace(frame, event, _, stop=stop):
            nonlocal reached
            if frame.f_code.co_filename != output_folder.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                reached += 1
                if reached > stop:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reads this when tracing starts
        sys.settrace(trace)
        try:
            replace(out)
        except KeyboardInterrupt:
            interrupts.append(reached)
        finally:
            sys.settrace(before)
        with contextlib.suppress(UserError), new_folder(out, overwrite=False):
            pass  # the next run clears up
        content = (out / "config.json").read_text()
        assert content in ("old", "new") and siblings(out) == {"out"}
        stop += 1
    assert stop > 100 and content == "new"


def test_other_threads_work_and_ignored_signals_stay_ignored(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with new_folder(tmp_path / "out", overwrite=False):
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as set by nohup
        assert signal.getsignal(signal.SIGTERM) is before[0]
    finally:
        signal.signal(signal.SIGHUP, before[1])
    thread = threading.Thread(target=replace, args=(tmp_path / "out",))
    thread.start()
    thread.join()
    assert (tmp_path / "out" / "config.json").read_text() == "new"
