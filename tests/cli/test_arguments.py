"""Options have the ranges of the settings, and an error is one line and a status."""

import errno

import pytest

from mlx_t5.cli.arguments import (
    NO_MEMORY,
    NUM_DRAFT,
    at_least,
    between,
    given_settings,
    option_of,
    run,
    within,
)
from mlx_t5.cli.options import build_parser
from mlx_t5.errors import UserError
from mlx_t5.ranges import LARGEST_COUNT
from mlx_t5.settings import SETTINGS

SERVER = "requirements/server.txt"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (at_least(2), "2", 2),
        (between(0, 1), "0.5", 0.5),
        (within(NUM_DRAFT), "auto", "auto"),
        (within(SETTINGS["max_tokens"].range), str(10**20), LARGEST_COUNT),
        (within(SETTINGS["early_stopping"].range), "False", False),
        (within(SETTINGS["early_stopping"].range), "never", "never"),
    ],
)
def test_values_within_a_range_are_read(kind, text, value):
    assert kind(text) == value and type(kind(text)) is type(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_an_option_with_its_range(name, capsys):
    parser = build_parser()
    assert given_settings(vars(parser.parse_args([]))) == {}
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([option_of(name), "x"])
    error = capsys.readouterr().err
    assert error.startswith("error: -") and f"{option_of(name)}: give " in error


METAL_OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)
CUDA_OUT_OF_MEMORY = "cudaMallocAsync(&data, size) failed: out of memory"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (UserError("no such thing"), "no such thing"),
        (OSError(errno.ENOSPC, "disk full", "x"), "disk full: x"),
        (
            ModuleNotFoundError(name="uvicorn.main"),
            f"uvicorn is not installed; pip install -r {SERVER}",
        ),
        (ModuleNotFoundError(name="mlx"), "mlx is not installed; pip install -r requirements.txt"),
        (RuntimeError(f"{METAL_OUT_OF_MEMORY}."), NO_MEMORY),
        (RuntimeError(CUDA_OUT_OF_MEMORY), NO_MEMORY),
        (RuntimeError("[malloc] Unable to allocate 5 bytes."), NO_MEMORY),
        (MemoryError("std::bad_alloc"), NO_MEMORY),
    ],
)
def test_an_error_prints_one_line_and_returns_status_2(raised, message, capsys):
    assert run(raising(raised), SERVER) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def raising(error: BaseException):
    def command():
        raise error

    return command


def test_an_interruption_returns_130_and_prints_the_commands_words(capsys):
    assert run(raising(KeyboardInterrupt()), SERVER, "stopped") == 130
    assert capsys.readouterr() == ("", "stopped\n")


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError(),
        RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error."),
    ],
)
def test_unexpected_errors_are_not_caught(error):
    with pytest.raises(type(error)):
        run(raising(error))
