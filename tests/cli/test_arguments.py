"""Options have the ranges of the settings, and an error is one line and a status."""

import argparse
import errno
from unittest.mock import Mock

import pytest

from mlx_t5.cli.arguments import (
    NO_MEMORY,
    at_least,
    between,
    num_draft,
    option_of,
    run,
    within,
)
from mlx_t5.cli.finetune_options import read_finetune_options
from mlx_t5.cli.generate_options import read_options
from mlx_t5.errors import UserError
from mlx_t5.settings import LARGEST_COUNT, SETTINGS


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (at_least(2), "2", 2),
        (between(0, 1), "0.5", 0.5),
        (num_draft().kind, "auto", "auto"),
        (SETTINGS["max_tokens"].range, str(10**20), LARGEST_COUNT),
        (SETTINGS["early_stopping"].range, "False", False),
        (SETTINGS["early_stopping"].range, "never", "never"),
    ],
)
def test_values_within_a_range_are_read(kind, text, value):
    read = within(kind, text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "texts", "expected"),
    [
        (at_least(2), ["1", "2.5"], "a whole number, at least 2"),
        (between(0, 1), ["1.1", "nan", "x"], "a number from 0 to 1"),
        (num_draft().kind, ["0", "AUTO"], "a whole number, at least 1, or auto"),
        (SETTINGS["early_stopping"].range, ["1", "x"], "true or false or never"),
    ],
)
def test_values_outside_a_range_are_refused_with_its_description(kind, texts, expected):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{expected}, not '{text}'$"):
            within(kind, text)


def test_every_setting_is_an_option_with_its_default_and_range(capsys):
    assert read_options([])[0].settings == {}
    with pytest.raises(SystemExit, match="0"):
        read_options(["--help"])
    printed = " ".join(capsys.readouterr().out.split()).lower()
    for name, declared in SETTINGS.items():
        assert f"(default: {declared.default})".lower() in printed
        with pytest.raises(SystemExit, match="2"):
            read_options([option_of(name), "x"])
        error = capsys.readouterr().err
        words = "true or false or never" if declared.range.kind is bool else declared.range.expected
        if name != "num_draft":  # which is at least 1 here
            assert error.startswith("error: -") and f"{option_of(name)}: {words}, not 'x'" in error


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-p hello", "prompt", ["hello"]),
        ("--num-draft-tokens 3", "settings", {"num_draft": 3}),
        ("--max-new-tokens=5", "settings", {"max_tokens": 5}),
        ("--max_tokens 5", "settings", {"max_tokens": 5}),
        ("--temperature 0.5 --prompt=--top_p", "settings", {"temp": 0.5}),
        ("--model_name_or_path x", "model", "x"),
    ],
)
def test_names_of_mlx_lm_and_transformers_are_understood(words, name, value):
    assert getattr(read_options(words.split())[0], name) == value


def test_names_of_other_trainers_are_understood():
    needed = "--model m --train_file d --output_dir o --lr 0.1 --lora-rank 4 --max_steps=7".split()
    options = read_finetune_options(needed)
    assert (options.data, options.output, options.r, options.iters) == ("d", "o", 4, 7)
    assert options.learning_rate == 0.1


@pytest.mark.parametrize("columns", [60, 120])
def test_help_has_the_width_of_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        read_options(["--help"])
    printed = capsys.readouterr().out.partition("examples:")[0]
    widest = max(len(line) for line in printed.splitlines())
    assert columns - 12 < widest <= columns


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
            "uvicorn is not installed; pip install -r requirements/server.txt",
        ),
        (ModuleNotFoundError(name="mlx"), "mlx is not installed; pip install -r requirements.txt"),
        (RuntimeError(f"{METAL_OUT_OF_MEMORY}."), NO_MEMORY),
        (RuntimeError(CUDA_OUT_OF_MEMORY), NO_MEMORY),
        (RuntimeError("[malloc] Unable to allocate 5 bytes."), NO_MEMORY),
        (MemoryError("std::bad_alloc"), NO_MEMORY),
    ],
)
def test_an_error_prints_one_line_and_returns_status_2(raised, message, capsys):
    assert run(Mock(side_effect=raised)) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_an_interruption_returns_130_and_prints_the_commands_words(capsys):
    assert run(Mock(side_effect=KeyboardInterrupt), "stopped") == 130
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
        run(Mock(side_effect=error))
