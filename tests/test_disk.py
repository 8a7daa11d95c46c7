"""Tests disk.py: flushing of files and folders on disks of all systems."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

import pytest

from mlx_t5.disk import flush, is_macos_file, sync


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


def test_macos_flushes_the_disks_own_cache_where_it_can(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: calls.append(command))
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    flush(0)
    assert calls == [51]

    def refuse(*_):
        raise OSError(errno.ENOTSUP, "")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    flush(0)
    assert calls == [51, "fsync"]


def test_files_of_macos_are_recognized():
    assert all(map(is_macos_file, (".DS_Store", "._config.json")))
    assert not any(map(is_macos_file, ("config.json", ".config.json", "DS_Store")))
