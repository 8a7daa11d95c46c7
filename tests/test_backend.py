"""OpenBLAS is loaded before MLX where it helps, and missed once where it is absent."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_t5 import backend
from mlx_t5.backend import hint, load_openblas, mx
from mlx_t5.errors import LONGEST_MESSAGE, UserError, shown

ROOT = Path(backend.__file__).resolve().parents[1]


class Loader:
    """A stand-in for `ctypes.CDLL` on a machine with these libraries."""

    def __init__(self, *installed):
        self.installed, self.asked = installed, []

    def __call__(self, name, mode=ctypes.DEFAULT_MODE):
        self.asked.append((name, mode))
        if name not in self.installed:
            raise OSError(name)


def test_loads_for_all_libraries_that_follow():
    loader = Loader("libopenblas.so.0")
    assert load_openblas("linux", loader)
    assert loader.asked == [("libopenblas.so.0", ctypes.RTLD_GLOBAL)]


def test_takes_the_development_name():
    loader = Loader("libopenblas.so")
    assert load_openblas("linux", loader)
    assert loader.asked[-1] == ("libopenblas.so", ctypes.RTLD_GLOBAL)


def test_says_that_it_is_absent():
    assert not load_openblas("linux", Loader())


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_leaves_other_systems_alone(platform):
    loader = Loader("libopenblas.so.0")
    assert load_openblas(platform, loader)
    assert loader.asked == []


def test_hint():
    """Only where OpenBLAS is missed: absent, and no GPU to compute on."""
    assert "apt install" in hint(found=False, cpu=True)
    assert hint(found=True, cpu=True) == hint(found=False, cpu=False) == ""
    assert hint(found=True, cpu=False) == ""


RUN = """
import ctypes, sys
platform, installed = sys.argv[1:]
libraries = ctypes.CDLL

def open_library(name, *args, **kwargs):
    if "openblas" not in str(name):
        return libraries(name, *args, **kwargs)
    print("late" if "mlx.core" in sys.modules else "first")
    if installed == "no":
        raise OSError(name)

ctypes.CDLL, sys.platform = open_library, platform
import model, decoder, mlx_t5.network.weights
"""


@pytest.mark.skipif(not backend.cpu_only(), reason="a GPU takes the place of OpenBLAS")
@pytest.mark.parametrize(
    ("platform", "installed", "loads", "hints"),
    [("linux", "yes", ["first"], 0), ("linux", "no", ["first"] * 2, 1), ("darwin", "no", [], 0)],
)
def test_importing_anything(platform, installed, loads, hints):
    """Whatever is imported first: OpenBLAS before MLX, at most one hint, on standard error."""
    arguments = [sys.executable, "-c", RUN, platform, installed]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == loads
    assert result.stderr.count("hint:") == hints
    assert result.stderr.count("\n") == hints


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
