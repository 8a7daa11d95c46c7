"""Tests disk.py: flushing of files and folders on disks of all systems."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from mlx_t5.disk import is_macos_file, sync


def refusing(number: int):
    """Returns an `os.fsync` that fails with this error number."""

    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize("number", (errno.EINVAL, errno.ENOTSUP))
def test_a_disk_may_refuse_to_flush_folders(tmp_path, monkeypatch, number):
    (tmp_path / "a").touch()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "fsync", refusing(number))
    sync(tmp_path)
    with pytest.raises(OSError):
        sync(tmp_path / "a")
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError):
        sync(tmp_path)


def test_files_of_macos_are_recognized():
    assert all(map(is_macos_file, (".DS_Store", "._config.json")))
    assert not any(map(is_macos_file, ("config.json", ".config.json", "DS_Store")))
