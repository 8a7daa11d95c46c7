"""Tests disk.py: flushing of files and folders on disks of all systems."""

from __future__ import annotations

import errno
import fcntl
import os
import sys

import pytest

from mlx_t5.disk import flush, sync


def refusing(number: int):
    """Returns a function that fails with this error number."""

    def refuse(*arguments) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_disk_may_refuse_to_flush_folders(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    monkeypatch.setattr(sys, "platform", "linux")
    for number, path, refused in (
        (errno.EINVAL, tmp_path, False),
        (errno.ENOTSUP, tmp_path, False),
        (errno.ENOTSUP, tmp_path / "a", True),
        (errno.EIO, tmp_path, True),
    ):
        monkeypatch.setattr(os, "fsync", refusing(number))
        if refused:
            with pytest.raises(OSError):
                sync(path)
        else:
            sync(path)


def test_macos_flushes_the_disks_own_cache_where_it_can(monkeypatch):
    calls = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: calls.append(command))
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    flush(0)
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.ENOTSUP))
    flush(0)
    assert calls == [51, "fsync"]
