"""Runs distill.py and finetune.py in this process: whole, stopped again and again, or refused."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mlx_t5.backend import mx, on_cpu
from mlx_t5.names import BUNDLED

TARGET = str(BUNDLED / "target")
Run = Callable[..., int]  # the command line, given its output and further options


def shortest_prompts(count: int) -> list[str]:
    """Of the bundled pair's held-out ones."""
    lines = (BUNDLED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line)["prompt"] for line in lines), key=len)[:count]


@contextlib.contextmanager
def heard() -> Iterator[tuple[list[str], list[str]]]:
    """What is logged meanwhile, and what is printed."""
    with pytest.MonkeyPatch.context() as patch:
        log: list[str] = []
        printed: list[str] = []
        patch.setattr("tqdm.tqdm.write", lambda line, **_: log.append(line))
        patch.setattr("builtins.print", lambda *a, **_: printed.append(str(a[0])))
        yield log, printed


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, mx.array]:
    """The tensors of a file."""
    return mx.load(str(folder / name))


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """Whether two runs came to the same; a GPU, and a Mac's CPU, may round in any order."""
    tolerance = 0 if on_cpu() and sys.platform != "darwin" else 1e-2
    return one.keys() == other.keys() and all(
        mx.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one
    )


def stopped_at_each(
    run: Run, output: Path, stops: Sequence[tuple[object, str, int]], capsys
) -> list[str]:
    """Interrupts a run and resumes it, once for each of `stops`; the last time nothing stops it.

    Args:
        run: the command line.
        output: of all runs.
        stops: functions, and at which call of them Ctrl-C comes.
        capsys: pytest's.

    Returns:
        The names of these functions, as often as they were called until they were stopped.
    """
    calls: list[str] = []
    for i, (owner, name, at) in enumerate(stops):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, _stopping(getattr(owner, name), at, calls))
            assert run(output, *["--resume"][: i > 0]) == 130
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("interrupted; go on with: python ")
        assert line.endswith(" --resume") and line.count("--resume") == 1
    assert run(output, "--resume") == 0
    return calls


def _stopping(function: Callable, at: int, calls: list[str]) -> Callable:
    def called(*args, **kwargs):
        calls.append(function.__name__)
        if calls.count(function.__name__) == at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return called


def check_refused(run: Run, output: Path, options: Sequence[str], message: str, capsys) -> None:
    """Asserts that bad input is one line with this message, and that nothing is written."""
    try:
        status = run(output, *options)
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and message in err and err.splitlines()[-1].startswith("error: ")
    assert not output.exists() and not output.with_name(f"{output.name}-work").exists()
