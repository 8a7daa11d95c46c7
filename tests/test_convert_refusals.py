"""convert.py refuses bad input in one line and never leaves a half-written folder."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoints
from checkpoints import TINY, arrays, siblings
from convert import convert, main
from fake_hub import FakeHub, serve
from mlx_t5.backend import mx
from mlx_t5.checkpoints import folder as model_folder
from mlx_t5.checkpoints.output_folder import require_apart
from mlx_t5.errors import UserError
from model import load

ROOT = Path(__file__).resolve().parent.parent


def test_an_unreadable_tensor_is_refused(tiny, tmp_path):
    state = checkpoints.random_state(TINY) | {"shared.weight": torch.ones(40, 64).double()}
    checkpoints.save(state, tiny, config=TINY)
    with pytest.raises(UserError, match="shared.weight is float64"):
        convert(tiny, tmp_path / "deep" / "out")
    assert siblings(tmp_path / "out") == {"source"}


def test_an_mlx_folder_is_no_source(tiny, tmp_path):
    out = convert(tiny, tmp_path / "out")
    with pytest.raises(UserError, match="MLX folder already"):
        convert(out, tmp_path / "again")


def test_overwriting_only_ever_replaces_models(tiny, tmp_path):
    out = convert(tiny, tmp_path / "out")
    for name, make, remove in (
        ("thesis.tex", Path.touch, Path.unlink),
        ("photos", Path.mkdir, Path.rmdir),
        ("2_Dense", Path.touch, Path.unlink),  # not the folder of a module
    ):
        make(out / name)
        with pytest.raises(UserError, match=rf"more than a model \({name}\)"):
            convert(tiny, out, overwrite=True)
        remove(out / name)
    with pytest.raises(UserError, match="config.json is a file"):
        convert(tiny, tiny / "config.json", overwrite=True)


def test_files_that_macos_leaves_in_folders_are_ignored(tiny, tmp_path):
    for folder in (tiny, convert(tiny, tmp_path / "out")):
        for name in (".DS_Store", "._config.json", "._model.safetensors"):
            (folder / name).write_bytes(b"\0\5\x16\7")
    assert siblings(convert(tiny, tmp_path / "out", overwrite=True) / "x") == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    }
    (tiny / "model.safetensors").unlink()
    message = "no model.safetensors or .*; it holds config.json, generation_config.json, tf_model"
    with pytest.raises(UserError, match=message):
        convert(tiny, tmp_path / "again")


def test_the_source_is_never_overwritten(tiny, tmp_path):
    (tiny / "tf_model.h5").unlink()
    link = tmp_path / "link"
    link.symlink_to(tiny)
    for out in (tiny, tmp_path / "source" / ".." / "source", link):
        with pytest.raises(UserError, match="source is the source, holds it"):
            convert(tiny, out, overwrite=True)
    with pytest.raises(UserError, match=r"more than a model \(link, source\)"):
        convert(tiny, tmp_path, overwrite=True)
    assert (tiny / "model.safetensors").is_file()


def test_the_source_is_safe_on_a_disk_that_ignores_case(tiny, respelled):
    (tiny / "tf_model.h5").unlink()
    before = (tiny / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="SOURCE is the source, holds it"):
        convert(tiny, respelled(tiny), overwrite=True)
    assert (tiny / "model.safetensors").read_bytes() == before


def test_a_part_of_the_source_is_not_replaced(tiny, tmp_path):
    (tiny / "1_Pooling").mkdir()
    for folder, out in ((tiny, tiny / "1_Pooling"), (tiny / "1_Pooling", tiny)):
        with pytest.raises(UserError, match="holds it or is a part of it"):
            require_apart(out, folder)
    require_apart(tiny / "mlx", tiny)  # a new folder replaces nothing
    require_apart(tmp_path / "new", tiny)


def test_disk_space_is_checked_first(tiny, tmp_path, monkeypatch):
    needed = []

    def full(place: Path) -> shutil._ntuple_diskusage:
        needed.append(place)
        return shutil._ntuple_diskusage(10**9, 10**9 - 4000, 4000)

    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(UserError, match=r"not enough space in .* MB are needed and 0.0 MB"):
        convert(tiny, tmp_path / "deep" / "out")
    assert needed == [tmp_path] and siblings(tmp_path / "out") == {"source"}


def test_required_space_covers_the_output(tiny, tmp_path, monkeypatch):
    sizes = []
    (tiny / "added_tokens.json").write_text("{}" + " " * 3_000_000)
    monkeypatch.setattr(model_folder, "require_space", lambda path, size: sizes.append(size))
    for options in ({}, {"quantize": True}, {"dtype": "float32"}):
        out = convert(tiny, tmp_path / "out", overwrite=True, **options)
        total = sum(file.stat().st_size for file in out.iterdir())
        assert total <= sizes.pop() <= total + (1 << 20)


SLOW = (  # runs a command whose conversion waits for ever at its first tensor
    "import sys, time, runpy\n"
    "file, *sys.argv[1:] = sys.argv[1:]\n"
    "sys.argv[0] = file\n"
    "from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter\n"
    "def slow(self, *arguments):\n"
    "    print('writing', flush=True); time.sleep(60)\n"
    "SafetensorsWriter.append = slow\n"
    "runpy.run_path(file, run_name='__main__')\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "how"),
    (
        (["convert.py"], signal.SIGKILL),
        (["convert.py"], signal.SIGTERM),
        (["convert.py"], signal.SIGINT),
        (["main.py", "--prompt", "a"], signal.SIGHUP),
        (["main.py", "--prompt", "a"], signal.SIGINT),
        (["server.py", "--port", "0"], signal.SIGTERM),
    ),
)
def test_a_stopped_conversion_leaves_nothing_that_looks_complete(tiny, tmp_path, command, how):
    """This holds for every command. The process waits inside the conversion: there is no race."""
    (work := tmp_path / "work").mkdir()
    files = {file.name: file.read_bytes() for file in tiny.iterdir()}
    arguments = [str(ROOT / command[0]), *command[1:], "--model", "google-t5/t5-tiny"]
    with serve(FakeHub({"google-t5/t5-tiny": files})) as hub:
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, *arguments],
            cwd=work,
            env=hub.environment(tmp_path / "hf") | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The tests' process may ignore the signal, as under nohup, and children inherit that.
            preexec_fn=lambda: how == signal.SIGKILL or signal.signal(how, signal.SIG_DFL),
        )
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(how)
        _, errors = process.communicate(timeout=30)
    folders = list((work / "models").iterdir())
    if how == signal.SIGKILL:
        assert [folder.name for folder in folders] == [f".t5-tiny.partial-{process.pid}"]
        with pytest.raises(UserError):
            load(folders[0])
    else:
        assert process.returncode == 128 + how and b"Traceback" not in errors
        assert folders == []
    convert(tiny, out := work / "models" / "t5-tiny")
    assert siblings(out) == {"t5-tiny"}


def test_the_command_line_converts_into_the_default_folder(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "source", "-q", "--q-bits", "8"]) == 0
    out = tmp_path / "models" / "source"  # the default folder
    assert capsys.readouterr().out == f"{out}\n"
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 8
    before = (out / "model.safetensors").read_bytes()
    assert main(["--model", "source/"]) == 2
    assert (out / "model.safetensors").read_bytes() == before
    assert capsys.readouterr() == (
        "",
        f"error: {out} exists; replace it with --overwrite or choose another folder\n",
    )
    assert main(["--model", "source", "--overwrite", "--dtype", "float32"]) == 0
    assert arrays(out)["shared.weight"].dtype == mx.float32
    assert siblings(out) == {"source"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["--model", "./nowhere"], "neither a folder nor a Hub id"),
        (["--model", "source", "-q", "--q-bits", "7"], "--q-bits 7 does not exist"),
        (["--model", "source", "--q-bits", "4"], "have an effect only with -q"),
        (["--model", "source", "--mlx-path", ""], "--mlx-path is empty"),
        (["--model", "empty"], "cannot read empty/config.json"),
        (["--model", "source", "--mlx-path", "file/out"], "cannot convert source to"),
        (["--model", "source", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--model", "source", "--q-bits", "x"], "invalid int value: 'x'"),
        ([], "--model"),
    ),
)
def test_bad_input_is_one_line_and_status_2(
    tiny, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    try:
        status = main(arguments)
    except SystemExit as exit:  # from argparse
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert siblings(tmp_path / "x") == {"source", "empty", "file"}
