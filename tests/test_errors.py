"""Tests the message of an exception for the user, without names of functions and numbers."""

import errno

import pytest

import convert
import finetune
import main
from mlx_t5.errors import reason

LONG = "x" * 300  # a name that no file system accepts


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "No space left on device: a/b"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("not whole"), "not whole"),
        (RuntimeError("[write] Unable to write to file."), "Unable to write to file."),
        (RuntimeError("[metal::load] no\nmore"), "no"),
        (ValueError("[1] of 2"), "of 2"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_error_is_told_in_one_line(error, said):
    assert reason(error) == said


@pytest.mark.parametrize(
    "program, options",
    [
        (main, f"--prompt a --model {LONG}"),
        (main, f"--prompt a --model demo/target --output-file {LONG}"),
        (convert, f"--model demo/target --mlx-path {LONG}"),
        (finetune, f"--model demo/target --output new --data {LONG}"),
    ],
)
def test_system_errors_are_reported_without_their_numbers(program, options, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert program.main(options.split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and "File name too long" in last and "Errno" not in last
