"""Command buffers: MLX's limits by GPU, and passes in turns with a process that has another."""

import pytest

from benchmarks import command_buffers
from benchmarks.command_buffers import MB, OPS, in_effect, tried, written
from mlx_t5.backend import cpu_only, mx
from mlx_t5.cli.models import BUNDLED
from mlx_t5.errors import UserError
from mlx_t5.timing import Ratio
from model import load

TARGET = str(BUNDLED / "target")


@pytest.mark.parametrize(
    ("architecture", "ops", "mb"),
    [
        ("applegpu_g13g", 40, 40),
        ("applegpu_g14p", 20, 40),
        ("applegpu_g15s", 50, 50),
        ("sm_75", 20, 100),
        ("sm_90", 100, 1000),
        ("sm_121", 20, 25),
        ("", 40, 40),
    ],
)
def test_limits_are_what_is_set_or_mlxs_own(architecture, ops, mb):
    assert in_effect(architecture, {}) == {OPS: ops, MB: mb}
    assert in_effect(architecture, {OPS: "7", MB: "many"}) == {OPS: 7, MB: 0}


def test_a_cell_has_both_limits_and_what_others_gained():
    assert written(None) == "unused"
    record = {"ops": 50, "MB": 40, "trials": {"1000 ops": Ratio(1.05, 1.0, 1.125), "400 MB": None}}
    assert written(record) == "50 ops, 40 MB (1000 ops: 1.05 (1.00 to 1.12), 400 MB: –)"


class Process:
    """Stands in for another process; its passes take a quarter of a second."""

    made: list = []
    broken = False

    def __init__(self, what, environment, **keywords):
        self.made.append((what, environment, keywords))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.made.append("ended")

    def call(self, method):
        if self.broken:
            raise UserError("its process ended with signal 9")
        assert method == "seconds"
        return 0.25


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(command_buffers, "cpu_only", lambda: False)
    monkeypatch.setattr(command_buffers, "Process", Process)
    monkeypatch.setattr(command_buffers.Passes, "seconds", lambda self: 0.5)
    monkeypatch.setattr(Process, "made", [])
    facts = {"architecture": "applegpu_g15s"}
    monkeypatch.setattr(command_buffers, "device_info", lambda: facts)


def test_each_value_is_tried_in_a_process_of_its_own(on_a_gpu, monkeypatch):
    target, _ = load(TARGET, "float32")
    trial = (target, TARGET, "float32", 9, lambda: range(3))
    twice = Ratio(2.0, 2.0, 2.0)
    trials = {"1000 ops": twice, "400 MB": twice}
    assert tried(*trial) == {"ops": 50, "MB": 50, "trials": trials}
    keywords = {"model": TARGET, "dtype": "float32", "source": 9}
    first, ended, second, _ = Process.made
    what = "benchmarks.command_buffers:Passes"
    assert first == (what, {OPS: "1000"}, keywords) and ended == "ended"
    assert second == (what, {MB: "400"}, keywords)
    failed = {"1000 ops": None, "400 MB": None}
    monkeypatch.setattr(Process, "broken", True)
    assert tried(*trial)["trials"] == failed and Process.made[-1] == "ended"
    del Process.made[:]
    monkeypatch.setattr(command_buffers, "limit", mx.get_active_memory)
    assert tried(*trial)["trials"] == failed, "there is no room for the target twice"
    assert not Process.made


@pytest.mark.skipif(not cpu_only(), reason="a GPU has command buffers")
def test_a_cpu_has_none():
    assert tried(None, TARGET, None, 9, list) is None


def test_passes_are_timed_here_or_by_name():
    assert command_buffers.Passes(TARGET, "float32", 9).seconds() > 0
