"""Tests the facts about the machine that a run reports."""

import os

import pytest

from benchmarks import machine

PROFILE = """Graphics/Displays:

    Apple M2 Ultra:

      Chipset Model: Apple M2 Ultra
      Type: GPU
      Bus: Built-In
      Total Number of Cores: 76
      Vendor: Apple (0x106b)
      Metal Support: Metal 3
"""


def test_the_number_of_threads_is_that_of_the_blas():
    mkl, openblas = "MKL 2026.2, AVX2 kernels", "OpenBLAS 0.3.21, Haswell kernels"
    assert machine.threads(mkl, {"OMP_NUM_THREADS": "300"}) <= os.cpu_count()
    assert machine.threads(openblas, {"OMP_NUM_THREADS": "3"}) == 3
    assert machine.threads(openblas, {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}) == 2
    assert 1 <= machine.threads(openblas, {"OMP_NUM_THREADS": "many"}) <= os.cpu_count()


def test_a_mac_is_asked_for_its_chip_and_the_cores_of_its_gpu():
    answers = {"sysctl": "Apple M2 Ultra\n", "system_profiler": PROFILE}
    facts = machine.hardware(lambda program, *_: answers[program], "darwin")
    assert (facts["chip"], facts["gpu_cores"]) == ("Apple M2 Ultra", 76)
    assert facts["system"].startswith("macOS")


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_unknown_gpu_cores_are_left_empty(system):
    facts = machine.hardware(lambda *_: "", system)
    assert facts["gpu_cores"] is None and facts["chip"] and facts["system"]
    assert facts["device"]["device_name"]


def test_a_missing_or_silent_program_prints_nothing(monkeypatch):
    assert machine.printed_by("echo", "a", "b") == "a b\n"
    assert machine.printed_by("no-such-program") == ""
    monkeypatch.setattr(machine, "SECONDS_TO_ANSWER", 0.05)
    assert machine.printed_by("sleep", "5") == ""
