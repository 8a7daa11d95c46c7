"""Tests the setup for an NVIDIA GPU, with an MLX that reports one."""

import os
from pathlib import Path

import pytest

from mlx_t5.backend import cuda as backend
from mlx_t5.backend import mx
from mlx_t5.backend.cuda import KERNEL_FOLDER, keep_kernels
from mlx_t5.errors import UserError

FACTS = {"device_name": "NVIDIA H100", "architecture": "sm_90", "total_memory": 1}


def test_kernels_are_kept_by_version_and_gpu_in_the_users_cache(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    for version, architecture in (("0.32.4", "sm_90"), ("0.32.5", "sm_90"), ("0.32.5", "sm_89")):
        # As in a child process, whose GPU may be different.
        keep_kernels(environment, version, {**FACTS, "architecture": architecture})
        assert environment[KERNEL_FOLDER] == str(tmp_path / "mlx" / version / "ptx" / architecture)
        assert Path(environment[KERNEL_FOLDER]).is_dir()


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "file").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    keep_kernels(environment, "1", FACTS)
    assert KERNEL_FOLDER not in environment


def test_kernels_cut_short_are_removed(tmp_path):
    """Such a kernel would make MLX fail in every run. An ELF file says where it ends."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    keep_kernels(environment, "1", FACTS)
    folder = Path(environment[KERNEL_FOLDER])
    header = backend.ELF.pack(b"\x7fELF", 1, 2, 3, 0, 0, 64, 0, 64, 0, 0, 64, 2, 0)
    whole = {"whole": header + bytes(128), "text": b".version 8.0"}
    damaged = {"cut": header + bytes(127), "header": header[:20], "empty": b""}
    for name, content in (whole | damaged).items():
        (folder / f"{name}.ptx").write_bytes(content)
    keep_kernels(environment, "1", FACTS)
    assert {path.stem for path in folder.iterdir()} == set(whole)


def test_compiling_is_announced_once_and_only_the_first_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: FACTS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(KERNEL_FOLDER, "")
    backend.prepare_cuda(os.environ)
    for process in range(2):
        backend.announce_kernels.cache_clear()
        for _ in ("target", "draft"):
            backend.announce_kernels()
        announced = capsys.readouterr().err
        assert announced == ("" if process else f"{backend.COMPILING}\n")
        (Path(os.environ[KERNEL_FOLDER]) / "kernel.ptx").touch()
    backend.announce_kernels.cache_clear()
    monkeypatch.setattr(mx, "device_info", dict)
    with pytest.raises(UserError, match="MLX finds no NVIDIA GPU.*T5_DEVICE=cpu computes without"):
        backend.prepare_cuda(os.environ)
