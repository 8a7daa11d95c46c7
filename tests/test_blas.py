"""Tests which BLAS is loaded, from where and with which kernels, with stand-in libraries."""

import ctypes
from importlib import metadata
from pathlib import PurePosixPath

import pytest

from mlx_t5.backend import blas as backend

AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | backend.OPENBLAS_KERNELS["SkylakeX"]
INTEL = b"Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) enabled processors"
MKL = ("libmkl_rt.so.3", "libtbb.so.12")
OPENBLAS = "libopenblas.so.0"


class Loader:
    """Stands in for `ctypes.CDLL` on a machine with the given libraries."""

    def __init__(self, *installed, processor=INTEL, **environment):
        self.installed, self.processor, self.environment = installed, processor, environment
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


@pytest.fixture
def mkl(tmp_path):
    """Returns MKL's file in a folder with all its parts."""
    for name in (*MKL, "libmkl_tbb_thread.so.3", "libtbb.so"):
        (tmp_path / name).touch()
    return tmp_path / MKL[0]


def load(loader, mkl, wish="", flags=AVX512, platform="linux"):
    environment = loader.environment | ({backend.BLAS: wish} if wish else {})
    loader.environment = environment
    return backend.load_blas(platform, loader, environment, mkl, lambda: flags)


def test_mkl_comes_first_with_threads_that_sleep(mkl):
    loader = Loader(*MKL, OPENBLAS)
    assert load(loader, mkl) == "MKL 2026.2, AVX-512 kernels"
    assert loader.requests == [("libtbb.so.12", False), ("libmkl_rt.so.3", True)]
    assert loader.threads == backend.TBB_THREADS
    load(loader := Loader(*MKL, MKL_THREADING_LAYER="INTEL"), mkl)
    assert loader.threads is None, "the user's threads are left alone"
    loader = Loader(*MKL, processor=b"Intel(R) Architecture processors")
    assert load(loader, mkl) == "MKL 2026.2, general kernels"


@pytest.mark.parametrize("missing", ["libmkl_tbb_thread.so.3", "libtbb.so.12"])
def test_openblas_takes_over_where_a_part_of_mkl_is_missing(mkl, missing):
    """An incomplete MKL would end the process at the first product."""
    (mkl.parent / missing).unlink()
    loader = Loader(*MKL, "libopenblas.so")
    assert load(loader, mkl) == "OpenBLAS 0.3.21, SkylakeX kernels"
    assert loader.requests[-2:] == [(OPENBLAS, True), ("libopenblas.so", True)]


def test_mkl_is_found_where_pip_put_it(monkeypatch, tmp_path):
    class File(PurePosixPath):
        def locate(self):
            return tmp_path / "site-packages" / self

    files = [File("../mkl.pc"), File("../libmkl_rt.so.3")]
    monkeypatch.setattr(metadata, "files", lambda name: files if name == "mkl" else None)
    assert backend.find_mkl() == tmp_path / "libmkl_rt.so.3"
    files.pop()
    assert load(Loader(OPENBLAS), None) == "OpenBLAS 0.3.21, SkylakeX kernels"


def test_the_user_chooses_the_blas(mkl):
    everything = Loader(*MKL, OPENBLAS)
    assert load(everything, mkl, "openblas") == "OpenBLAS 0.3.21, SkylakeX kernels"
    assert load(everything, mkl, "mkl") == "MKL 2026.2, AVX-512 kernels"
    assert load(everything, mkl, "none") is load(Loader(), mkl) is None
    assert load(everything, mkl, "blis", platform="darwin") is None, "only Linux needs one"
    for wish in ("mkl", "openblas"):
        with pytest.raises(ValueError, match=f"T5_BLAS is {wish}, which is not installed"):
            load(Loader(), mkl, wish)


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [(AVX512, "SkylakeX"), (AVX512 - {"avx512vl"}, "Haswell"), ({"avx2"}, "Prescott")],
)
def test_openblas_is_told_what_the_processor_has(flags, kernels):
    loader = Loader(OPENBLAS)
    assert load(loader, None, "openblas", flags).endswith(f"{kernels} kernels")
    assert "OPENBLAS_CORETYPE" not in loader.environment
    loader = Loader(OPENBLAS, OPENBLAS_CORETYPE="Zen")
    assert load(loader, None, "openblas", flags).endswith("Zen kernels"), "the user's choice"


def test_the_flags_of_the_processor_are_read(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu fma avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert backend.read_cpu_flags(str(path)) == {"fpu", "fma", "avx2"}
    path.write_text("processor\t: 0\nFeatures\t: fp asimd\n")  # aarch64
    assert backend.read_cpu_flags(str(path)) == backend.read_cpu_flags("/none") == set()
