"""A fast BLAS is loaded before MLX where it helps; if it is missing, one hint says so."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest

from mlx_t5 import backend
from mlx_t5.backend import REFERENCE_BLAS, mx
from mlx_t5.backend.blas import BLAS, hint
from mlx_t5.backend.device import DEVICE, SETTINGS, choose_device
from mlx_t5.errors import LONGEST_MESSAGE, UserError, brief
from snippets import ROOT
from standard_error import messages, without_metal


def installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_a_hint_is_given_only_if_a_blas_is_missed():
    """A BLAS is missed if none is loaded, the user has not refused one, and there is no GPU."""
    assert "pip install" in hint(REFERENCE_BLAS, "", cpu=True)
    assert hint("OpenBLAS 0.3.21, Zen kernels", "", cpu=True) == ""
    assert hint(REFERENCE_BLAS, "none", cpu=True) == hint(REFERENCE_BLAS, "", cpu=False) == ""


RUN = """
import ctypes, sys
libraries = ctypes.CDLL

def open_library(name, *args, **kwargs):
    if "openblas" in str(name) or "libmkl_rt" in str(name):
        print("late" if "mlx.core" in sys.modules else "first")
        if sys.argv[1] == "absent":
            raise OSError(name)
    return libraries(name, *args, **kwargs)

ctypes.CDLL, sys.platform = open_library, "linux"
import model, decoder, mlx_t5.checkpoints.names
from mlx_t5.backend import device_name
print(device_name(), file=sys.stderr)
"""


def python(code, *argv, **variables):
    """Runs Python code in a process with these variables; returns its output and errors."""
    environment = {name: value for name, value in (os.environ | variables).items() if value}
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout, without_metal(done.stderr)


@pytest.mark.skipif(not backend.cpu_only(), reason="a GPU takes the place of a BLAS")
def test_importing_without_a_blas_prints_one_hint():
    """The hint is on standard error and appears once, whichever module is imported first."""
    tried, errors = python(RUN, "absent", **{BLAS: ""})
    assert set(tried.split()) == {"first"}
    assert [line.startswith("hint:") for line in errors.splitlines()] == [True, False]


MULTIPLY = """
from mlx_t5.backend import mx
mx.eval(mx.ones((512, 512)) @ mx.ones((512, 512)))
print(open("/proc/self/maps").read())
"""


@pytest.mark.skipif(not (backend.cpu_only() and installed("mkl")), reason="no CPU with MKL")
def test_mkl_is_loaded_before_mlx_and_multiplies_with_tbb_threads():
    tried, described = python(RUN, "there", **{BLAS: "mkl"})
    assert set(tried.split()) == {"first"}
    assert re.fullmatch(r".* cores, MKL 20\d\d\.\d, [\w-]+ kernels\n", described)
    maps, _ = python(MULTIPLY, MKL_THREADING_LAYER="", **{BLAS: "mkl"})
    assert set(re.findall(r"libmkl_(\w+)_thread", maps)) == {"tbb"}


LINUX_ONLY = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="no choice but on Linux"
)


@pytest.mark.parametrize(
    ("command", "variable", "choices"),
    [
        pytest.param("main.py", BLAS, "mkl, openblas or none", marks=LINUX_ONLY),
        ("benchmark.py sweep", DEVICE, "cpu or gpu"),
    ],
)
def test_an_unknown_choice_is_refused_in_one_line(command, variable, choices):
    result = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, variable: "blis"},
        input="",
    )
    assert result.returncode == 2
    assert messages(result.stderr) == [f"error: {variable} must be {choices}, not blis"]


def test_the_device_is_the_one_that_computes(monkeypatch):
    """`is_available` only says how MLX was built; a Mac that uses its CPU also has a GPU."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    facts = {mx.cpu: {"device_name": "Some CPU"}, mx.gpu: {"device_name": "Apple M9"}}
    for device, start in ((mx.cpu, f"Some CPU, {os.cpu_count()} cores, "), (mx.gpu, "Apple M9")):
        monkeypatch.setattr(mx, "default_device", lambda device=device: mx.Device(device))
        monkeypatch.setattr(mx, "device_info", lambda device=device: facts[device])
        assert backend.on_cpu() is (device == mx.cpu)
        assert backend.device_name().startswith(start)
    assert backend.device_name() == "Apple M9", "a GPU multiplies without a BLAS"


def test_t5_device_chooses_the_device():
    chosen = []
    for wish in ("", "cpu", "gpu"):
        choose_device(wish, chosen.append)
    assert chosen == [mx.cpu, mx.gpu]

    def refuse(device):
        raise ValueError("Cannot set gpu device without gpu backend.")

    with pytest.raises(UserError, match="T5_DEVICE is gpu, and MLX has none here"):
        choose_device("gpu", refuse)


def test_mlx_is_told_before_it_is_imported():
    """Settings have the names from MLX's sources; values set by the user stay."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'mlx.core': print({n: os.environ.get(n) for n in sys.argv[1:]})\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import mlx_t5.backend as backend\n"
        "print(backend.mx.default_device())\n"
    )
    unset = dict.fromkeys(SETTINGS, "") | {"MLX_CUDA_GRAPH_CACHE_SIZE": "77", DEVICE: "cpu"}
    first, last = python(code, *SETTINGS, **unset)[0].splitlines()
    assert ast.literal_eval(first) == {
        "MLX_ENABLE_TF32": "0",
        "MLX_CUDA_USE_CUDNN_SDPA": "0",
        "MLX_CUDA_GRAPH_CACHE_SIZE": "77",
        "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    }
    assert last == "Device(cpu, 0)"


def test_text_quoted_from_a_file_is_short_and_printable():
    assert brief("Übung 猫") == "Übung 猫"
    assert brief("\x1b[2J\nerror: \u202e\udcff") == r"\x1b[2J\nerror: \u202e\udcff"
    deep = "a"
    for _ in range(5000):
        deep = [deep]
    assert all(len(brief(long)) < 110 for long in ("a" * 10**6, deep, [deep] * 100_000))
    error = str(UserError("\x1b[31m" + "a\n" * 1_000_000 + "the cure"))
    assert error.isprintable() and len(error) < 2 * LONGEST_MESSAGE
    assert error.startswith(r"\x1b[31ma\na") and error.endswith("the cure")
