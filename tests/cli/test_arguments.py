"""Options: ranges are those of the settings, and what goes wrong is one line and a status."""

import argparse
import errno

import pytest

from mlx_t5.cli.arguments import (
    NUM_DRAFT,
    Parser,
    add_setting,
    add_speculation,
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
NUMBERS = [name for name, setting in SETTINGS.items() if setting.range.kind is not bool]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (at_least(2), "2", 2),
        (between(0, 1), "0.5", 0.5),
        (within(NUM_DRAFT), "3", 3),
        (within(NUM_DRAFT), "auto", "auto"),
        (within(SETTINGS["temp"].range), "0", 0.0),
        (within(SETTINGS["max_tokens"].range), str(10**20), LARGEST_COUNT),
        (within(SETTINGS["seed"].range), str(2**64 - 1), 2**64 - 1),
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
        *((within(SETTINGS[name].range), "x", SETTINGS[name].range.expected) for name in NUMBERS),
    ],
)
def test_what_is_not_is_refused_in_the_words_of_the_range(kind, text, expected):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        kind(text)
    assert str(refused.value) == f"give {expected}, not '{text}'"


def test_every_setting_is_an_option_with_its_words_and_its_range(capsys):
    parser = build_parser()
    assert given_settings(parser.parse_args([])) == {}
    printed = " ".join(parser.format_help().replace("-\n", "-").split())
    for name, setting in SETTINGS.items():
        option = option_of(name)
        assert " ".join(setting.help.split()) in printed, name
        assert (
            f"(default: {setting.default_help or str(setting.default)}".lower() in printed.lower()
        )
        with pytest.raises(SystemExit) as end:
            parser.parse_args([option, "x"])
        expected = f": give {setting.range.expected}, not 'x'"
        if name == "num_draft":
            expected = ": give a whole number, at least 1, or auto (or --regular-decode for no d"
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert error.startswith("error: -") and f"{option}{expected}" in error


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("never", "never")])
def test_a_flag_of_three_values(text, value):
    assert build_parser().parse_args(["--early-stopping", text]).early_stopping == value


def test_another_command_line_has_other_defaults_and_words(capsys):
    parser = Parser()
    add_setting(parser, "--max-tokens", default=200, help="longest text")
    add_setting(parser, "--temp", default=[0.0])
    add_speculation(parser, without="--none")
    args = parser.parse_args(["--temp", "0", "1"])
    assert vars(args) == {"max_tokens": 200, "temp": [0, 1], "num_draft": None, "delta": 0}
    assert "longest text (default: 200)" in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--num-draft", "0"])
    assert capsys.readouterr().err.endswith("or auto (or --none for no draft), not '0'\n")


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
