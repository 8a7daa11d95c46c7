"""Runs distill.py and finetune.py in this process: to the end, interrupted, or refused."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from mlx_t5.backend import mx, on_cpu
from mlx_t5.disk import BUNDLED

TARGET = str(BUNDLED / "target")


def shortest_prompts(count: int) -> list[str]:
    """Returns the shortest held-out prompts of the bundled pair."""
    lines = (BUNDLED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line)["prompt"] for line in lines), key=len)[:count]


@contextlib.contextmanager
def heard():
    """Yields two lists that collect the lines logged and the lines printed during the block."""
    with pytest.MonkeyPatch.context() as patch:
        log, printed = [], []
        patch.setattr("tqdm.tqdm.write", lambda line, **_: log.append(line))
        patch.setattr("builtins.print", lambda *a, **_: printed.append(str(a[0])))
        yield log, printed


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, mx.array]:
    """Returns the tensors of a file."""
    return mx.load(str(folder / name))


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """Returns whether two runs have equal weights, up to rounding on a GPU or a Mac."""
    tolerance = 0 if on_cpu() and sys.platform != "darwin" else 1e-2
    return one.keys() == other.keys() and all(
        mx.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one
    )


def stopped_at_each(run, output: Path, stops: list[tuple], capsys) -> list[str]:
    """Interrupts and resumes a run once for each of `stops`, and finally lets it finish.

    Args:
        run: the function that runs the command line.
        output: the output of all runs.
        stops: the functions, and the number of the call at which Ctrl-C arrives.
        capsys: the fixture of pytest.

    Returns:
        The names of the functions in `stops`, one name for each call until the interrupt.
    """
    calls: list[str] = []
    for i, (owner, name, at) in enumerate(stops):
        function = getattr(owner, name)

        def called(*args, name=name, at=at, function=function, **kwargs):
            calls.append(name)
            if calls.count(name) == at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, called)
            assert run(output, *["--resume"][: i > 0]) == 130
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("interrupted; go on with: python ")
        assert line.endswith(" --resume") and line.count("--resume") == 1
    assert run(output, "--resume") == 0
    return calls


def check_refused(run, output: Path, options: list[str], message: str, capsys) -> None:
    """Asserts that bad input gives one line with this message and writes nothing."""
    try:
        status = run(output, *options)
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and message in err and err.splitlines()[-1].startswith("error: ")
    assert not output.exists() and not output.with_name(f"{output.name}-work").exists()
