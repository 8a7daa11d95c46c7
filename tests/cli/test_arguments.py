"""Options: ranges are those of the settings, and what goes wrong is one line and a status."""

import argparse
import errno
from dataclasses import fields

import pytest

from mlx_t5.cli.arguments import (
    NUM_DRAFT,
    Parser,
    add_setting,
    add_speculation,
    at_least,
    between,
    run,
    within,
)
from mlx_t5.errors import UserError
from mlx_t5.ranges import LARGEST_COUNT, RANGES
from mlx_t5.requests import Settings

SERVER = "requirements/server.txt"
NUMBERS = [name for name, allowed in RANGES.items() if allowed.kind is not bool]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (at_least(2), "2", 2),
        (between(0, 1), "0.5", 0.5),
        (within(NUM_DRAFT), "3", 3),
        (within(NUM_DRAFT), "auto", "auto"),
        (within(RANGES["temp"]), "0", 0.0),
        (within(RANGES["max_tokens"]), str(10**20), LARGEST_COUNT),
        (within(RANGES["seed"]), str(2**64 - 1), 2**64 - 1),
    ],
)
def test_what_is_within_a_range_is_read(kind, text, value):
    assert kind(text) == value and type(kind(text)) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (at_least(2), "1", "a whole number, at least 2"),
        (at_least(2), "2.5", "a whole number, at least 2"),
        (between(0, 1), "1.1", "a number from 0 to 1"),
        (between(0, 1), "nan", "a number from 0 to 1"),
        (between(0, 1), "x", "a number from 0 to 1"),
        (within(NUM_DRAFT), "0", "a whole number, at least 1, or auto"),
        *((within(RANGES[name]), "x", RANGES[name].expected) for name in NUMBERS),
    ],
)
def test_what_is_not_is_refused_in_the_words_of_the_range(kind, text, expected):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        kind(text)
    assert str(refused.value) == f"give {expected}, not '{text}'"


def test_the_option_of_a_setting_has_its_name_its_range_and_its_default(capsys):
    parser = Parser()
    add_speculation(parser, without="--none")
    names = [field.name for field in fields(Settings) if field.name in NUMBERS]
    for name in names:
        if name not in ("num_draft", "delta"):
            add_setting(parser, f"--{name.replace('_', '-')}", help="x")
    args = vars(parser.parse_args([]))
    assert args == {name: getattr(Settings(), name) for name in names}
    for name in names:
        with pytest.raises(SystemExit) as end:
            parser.parse_args([f"--{name.replace('_', '-')}", "x"])
        expected = RANGES[name].expected
        if name == "num_draft":
            expected = "a whole number, at least 1, or auto (or --none for no draft)"
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert error.startswith(f"error: --{name.replace('_', '-')}: give ") and expected in error


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (OSError(errno.ENOSPC, "disk full", "x"), 2, "error: [Errno 28] disk full: 'x'\n"),
        (
            ModuleNotFoundError(name="uvicorn.main"),
            2,
            f"error: uvicorn is not installed; pip install -r {SERVER}\n",
        ),
        (
            ModuleNotFoundError(name="mlx"),
            2,
            "error: mlx is not installed; pip install -r requirements.txt\n",
        ),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_status(raised, status, told, capsys):
    def command():
        raise raised

    assert run(command, SERVER, "stopped") == status
    assert capsys.readouterr() == ("", told)


def test_what_is_a_mistake_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


METAL_OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(METAL_OUT_OF_MEMORY), f" ({METAL_OUT_OF_MEMORY.rstrip('.')})"),
        (
            RuntimeError("cudaMallocAsync(&data, size) failed: out of memory"),
            " (cudaMallocAsync(&data, size) failed: out of memory)",
        ),
        (
            RuntimeError("[malloc] Unable to allocate 5 bytes."),
            " ([malloc] Unable to allocate 5 bytes)",
        ),
        (MemoryError(), ""),
    ],
)
def test_running_out_of_memory_is_one_line(error, reason, capsys):
    def command():
        raise error

    assert run(command) == 2
    assert capsys.readouterr().err == (
        f"error: out of memory{reason}; take a smaller or a quantised model, shorter prompts, or "
        "fewer at a time\n"
    )


def test_other_errors_of_mlx_are_not_taken_for_that():
    def command():
        raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error.")

    with pytest.raises(RuntimeError):
        run(command)
