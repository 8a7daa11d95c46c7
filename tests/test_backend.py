"""A fast BLAS is loaded before MLX where it helps, and missed once where there is none."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mlx_t5 import backend, blas
from mlx_t5.backend import hint, mx
from mlx_t5.blas import REFERENCE
from mlx_t5.errors import LONGEST_MESSAGE, UserError, shown

ROOT = Path(backend.__file__).resolve().parents[1]


def installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_hint():
    """Only where a BLAS is missed: none is loaded nor refused, and no GPU to compute on."""
    assert "pip install" in hint(REFERENCE, "", cpu=True)
    assert hint("OpenBLAS 0.3.21, Zen kernels", "", cpu=True) == ""
    assert hint(REFERENCE, "none", cpu=True) == hint(REFERENCE, "", cpu=False) == ""


RUN = """
import ctypes, sys
from importlib import metadata
platform, installed = sys.argv[1:]
libraries = ctypes.CDLL

def open_library(name, *args, **kwargs):
    if "openblas" not in str(name) and "libmkl_rt" not in str(name):
        return libraries(name, *args, **kwargs)
    print("late" if "mlx.core" in sys.modules else "first")
    if installed == "no":
        raise OSError(name)
    return libraries(name, *args, **kwargs)

ctypes.CDLL, sys.platform = open_library, platform
import model, decoder, mlx_t5.network.weights
from mlx_t5.backend import device_name
print(device_name(), file=sys.stderr)
"""


def importing(platform, installed, wish=""):
    """Standard output and lines of standard error of a process that imports everything."""
    environment = {**os.environ, blas.VARIABLE: wish}
    arguments = [sys.executable, "-c", RUN, platform, installed]
    result = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    return result.stdout.split(), result.stderr.splitlines()


@pytest.mark.skipif(not backend.cpu_only(), reason="a GPU takes the place of a BLAS")
@pytest.mark.parametrize(("platform", "wish", "hints"), [("linux", "", 1), ("darwin", "", 0)])
def test_importing_anything_without_a_blas(platform, wish, hints):
    """Whatever is imported first: at most one hint, on standard error."""
    tried, errors = importing(platform, "no", wish)
    assert set(tried) == ({"first"} if hints else set())
    assert [line.startswith("hint:") for line in errors] == [True] * hints + [False]


@pytest.mark.skipif(not installed("mkl"), reason="MKL is not installed")
def test_the_real_one_is_loaded_before_mlx():
    tried, (described,) = importing("linux", "yes", "mkl")
    assert set(tried) == {"first"}
    assert re.search(r"cores, MKL 20\d\d\.\d, [\w-]+ kernels$", described)


MULTIPLY = """
from mlx_t5.backend import mx
mx.eval(mx.ones((512, 512)) @ mx.ones((512, 512)))
print(open("/proc/self/maps").read())
"""


@pytest.mark.skipif(not installed("mkl"), reason="MKL is not installed")
@pytest.mark.parametrize("layer", [None, "INTEL"])
def test_whose_threads_multiply(layer):
    """TBB's, which sleep when there is nothing to do, unless the user wants others."""
    environment = {**os.environ, blas.VARIABLE: "mkl"}
    environment.pop("MKL_THREADING_LAYER", None)
    environment |= {"MKL_THREADING_LAYER": layer} if layer else {}
    command = [sys.executable, "-c", MULTIPLY]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    in_use = set(re.findall(r"libmkl_(\w+)_thread", result.stdout))
    assert in_use == {"intel" if layer else "tbb"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no choice but on Linux")
@pytest.mark.parametrize("command", ["main.py", "convert.py --model x", "benchmark.py sweep"])
def test_an_unknown_wish_is_one_line(command):
    environment = {**os.environ, blas.VARIABLE: "blis"}
    arguments = [sys.executable, *command.split()]
    result = subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, env=environment, input=""
    )
    assert result.returncode == 2
    assert result.stderr == "error: T5_BLAS must be mkl, openblas or none, not blis\n"


def test_cpu_only():
    assert backend.cpu_only() is (mx.default_device().type == mx.DeviceType.cpu)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("shared.weight", "shared.weight"),
        ("Übung 猫", "Übung 猫"),
        ("\x1b[2J\nerror: \u202e", r"\x1b[2J\nerror: \u202e"),
        ("\udcff", r"\udcff"),
        ("a" * 1_000_000, "a" * 99 + "…"),
        (["a", 1], "['a', 1]"),
    ],
)
def test_what_is_quoted_of_a_file(value, expected):
    assert shown(value) == expected


def test_what_is_quoted_of_deep_lists_and_of_long_ones():
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert len(shown(deep)) < 110 and len(shown([deep] * 100_000)) < 110


def test_an_error_is_one_line_that_a_terminal_can_show():
    error = str(UserError("\x1b[31m" + "a\n" * 1_000_000 + "the cure"))
    assert error.isprintable() and len(error) < 2 * LONGEST_MESSAGE
    assert error.startswith(r"\x1b[31ma\na") and error.endswith("the cure")
