"""Tests which BLAS is loaded, from where and with which kernels, with stand-in libraries."""

import ctypes
from importlib import metadata
from pathlib import PurePosixPath

import pytest

from mlx_t5 import backend

AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | backend.OPENBLAS_KERNELS["SkylakeX"]
INTEL = b"Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) enabled processors"


class Loader:
    """Stands in for `ctypes.CDLL` on a machine with the given libraries."""

    def __init__(self, *installed, environment=None, processor=INTEL):
        self.installed, self.processor = installed, processor
        self.environment = {} if environment is None else environment
        self.requests, self.threads, self.settled = [], None, False

    def __call__(self, name, mode=ctypes.DEFAULT_MODE):
        name = name.rpartition("/")[2]
        self.requests.append((name, mode == ctypes.RTLD_GLOBAL))
        if name not in self.installed:
            raise OSError(name)
        kernels = self.environment.get("OPENBLAS_CORETYPE", "Prescott").encode()
        self.openblas_get_corename = lambda: kernels
        self.openblas_get_config = lambda: b"OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH"
        return self

    def MKL_Set_Threading_Layer(self, layer):
        self.threads = None if self.settled else layer

    def MKL_Get_Version(self, pointer):
        self.settled = True
        version = pointer._obj
        version.major, version.update, version.processor = 2026, 2, self.processor


MKL = ("libmkl_rt.so.3", "libtbb.so.12")
OPENBLAS = "libopenblas.so.0"


@pytest.fixture
def mkl(tmp_path):
    """Returns MKL's file in a folder with all its parts."""
    for name in (*MKL, "libmkl_tbb_thread.so.3", "libtbb.so"):
        (tmp_path / name).touch()
    return tmp_path / MKL[0]


def load(loader, mkl, wish="", flags=AVX512):
    loader.environment.update({backend.BLAS: wish} if wish else {})
    return backend.load_blas("linux", loader, loader.environment, mkl, lambda: flags)


@pytest.mark.parametrize(
    ("environment", "processor", "kernels", "threads"),
    [
        ({}, INTEL, "AVX-512", backend.TBB_THREADS),  # threads that sleep
        ({"MKL_THREADING_LAYER": "INTEL"}, INTEL, "AVX-512", None),  # the user's choice
        ({}, b"Intel(R) Architecture processors", "general", backend.TBB_THREADS),
    ],
)
def test_mkl_comes_first(mkl, environment, processor, kernels, threads):
    loader = Loader(*MKL, OPENBLAS, environment=environment, processor=processor)
    assert load(loader, mkl) == f"MKL 2026.2, {kernels} kernels"
    assert loader.requests == [("libtbb.so.12", False), ("libmkl_rt.so.3", True)]
    assert loader.threads == threads


@pytest.mark.parametrize("missing", ["libmkl_tbb_thread.so.3", "libtbb.so.12"])
def test_openblas_takes_over_where_a_part_of_mkl_is_missing(mkl, missing):
    """An incomplete MKL would end the process at the first product."""
    (mkl.parent / missing).unlink()
    loader = Loader(*MKL, OPENBLAS)
    assert load(loader, mkl) == "OpenBLAS 0.3.21, SkylakeX kernels"
    assert ("libmkl_rt.so.3", True) not in loader.requests
    assert load(Loader(), mkl) is None, "where neither is installed"


def test_openblas_is_loaded_if_mkl_is_missing(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    loader = Loader("libopenblas.so")
    assert load(loader, None) == "OpenBLAS 0.3.21, SkylakeX kernels"
    assert loader.requests == [(OPENBLAS, True), ("libopenblas.so", True)]


def test_mkl_is_found_where_pip_put_it(monkeypatch, tmp_path):
    class File(PurePosixPath):
        def locate(self):
            return tmp_path / "site-packages" / self

    files = [File("../mkl.pc"), File("../libmkl_rt.so.3")]
    monkeypatch.setattr(metadata, "files", lambda name: files if name == "mkl" else None)
    assert backend.find_mkl() == tmp_path / "libmkl_rt.so.3"
    files.pop()
    with pytest.raises(OSError):
        backend.find_mkl()


@pytest.mark.parametrize(
    ("wish", "loaded"),
    [("mkl", "MKL 2026.2, AVX-512 kernels"), ("openblas", "OpenBLAS 0.3.21, SkylakeX kernels")],
)
def test_the_user_chooses_the_blas(mkl, wish, loaded):
    assert load(Loader(*MKL, OPENBLAS), mkl, wish) == loaded
    with pytest.raises(ValueError, match=f"T5_BLAS is {wish}, which is not installed"):
        load(Loader(), mkl, wish)
    assert load(refused := Loader(*MKL, OPENBLAS), mkl, "none") is None
    assert not refused.requests


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        (AVX512, "SkylakeX"),
        (AVX512 - {"avx512vl"}, "Haswell"),
        (AVX2, "Haswell"),
        ({"avx2"}, "Prescott"),
        (set(), "Prescott"),
    ],
)
def test_openblas_is_told_what_the_processor_has(flags, kernels):
    loader = Loader(OPENBLAS)
    assert load(loader, None, "openblas", flags).endswith(f"{kernels} kernels")
    assert "OPENBLAS_CORETYPE" not in loader.environment


def test_the_users_kernels_are_left_alone():
    environment = {"OPENBLAS_CORETYPE": "Zen"}
    loader = Loader(OPENBLAS, environment=environment)
    assert load(loader, None, "openblas").endswith("Zen kernels")
    assert environment["OPENBLAS_CORETYPE"] == "Zen"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_left_alone(mkl, platform):
    loader = Loader(*MKL, OPENBLAS)
    assert backend.load_blas(platform, loader, {backend.BLAS: "blis"}, mkl) is None
    assert loader.requests == []


def test_the_flags_of_the_processor_are_read(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu fma avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert backend.read_cpu_flags(str(path)) == {"fpu", "fma", "avx2"}
    path.write_text("processor\t: 0\nFeatures\t: fp asimd\n")  # aarch64
    assert backend.read_cpu_flags(str(path)) == set()
    assert backend.read_cpu_flags(str(tmp_path / "none")) == set()
