"""Tests what a checkout and an installed package do differently, without installing anything.

`.ci/run` installs a wheel and runs the commands from an empty folder.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import decoder
import mlx_t5
import model
from mlx_t5 import __main__ as all_commands
from mlx_t5 import installation
from mlx_t5.backend import device
from mlx_t5.installation import PACKAGE, command, cure
from snippets import ROOT

# As in the metadata of an installed package.
DECLARED = (
    "mlx<0.33,>=0.32.1; sys_platform == 'darwin'",
    "numpy<3,>=2.0",
    "mlx[cpu]<0.33; (sys_platform != 'darwin') and extra == 'cpu'",
    "mkl<2027; (sys_platform == 'linux') and extra == 'cpu'",
    "mlx[cuda13]<0.33; extra == 'cuda13'",
    "fastapi-offline<2; extra == 'server'",
    "uvicorn<1; extra == 'server'",
)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(installation, "IN_CHECKOUT", False)
    monkeypatch.setattr(metadata, "requires", lambda name: {"mlx-t5": DECLARED}[name])


def test_each_class_exists_once():
    assert mlx_t5.load is model.load and mlx_t5.T5 is model.T5
    assert mlx_t5.SpeculativeDecoder is decoder.SpeculativeDecoder
    with pytest.raises(AttributeError, match=r"^module 'mlx_t5' has no attribute 'convert_all'$"):
        _ = mlx_t5.convert_all


def test_a_users_own_model_file_stays_theirs(tmp_path):
    """An editable install has the checkout behind the script's folder in `sys.path`."""
    (tmp_path / "model.py").write_text("mine = 1\n")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from mlx_t5 import SpeculativeDecoder, T5; import mlx_t5.model, model\n"
        "assert mlx_t5.model.T5 is T5 and model.mine, (T5, model)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("started", "said"),
    [
        ("main.py", "python convert.py"),
        ("/usr/bin/pytest", "python convert.py"),
        ("/opt/bin/mlx_t5.generate", "mlx_t5.convert"),
        (str(PACKAGE / "generate.py"), "python -m mlx_t5.convert"),
        ("mlx-t5 generate", "mlx-t5 convert"),
        ("python -m mlx_t5 generate", "python -m mlx_t5 convert"),
    ],
)
def test_commands_are_named_as_the_user_starts_them(monkeypatch, started, said):
    monkeypatch.setattr(sys, "argv", [started])
    assert command("convert") == said
    monkeypatch.setattr(installation, "IN_CHECKOUT", False)
    if said.endswith(".py"):  # a program that imports the package
        assert command("convert") == "mlx_t5.convert"


def test_one_command_starts_the_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/mlx-t5"])
    with pytest.raises(SystemExit, match="0"):
        all_commands.main(["convert", "--help"])
    assert capsys.readouterr().out.startswith("usage: mlx-t5 convert --model NAME")
    for argv in ([], ["transform"], ["--revert"]):
        with pytest.raises(SystemExit, match="2"):
            all_commands.main(argv)
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert argv == ["--revert"] or "generate" in error, "the commands to choose from"


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac needs no extra for mlx")
def test_an_installed_package_names_a_missing_one_with_its_extra(installed):
    cpu = "pip install 'mlx[cpu]<0.33'" + " 'mkl<2027'" * (sys.platform == "linux")
    assert cure("mlx") == f"{cpu} or pip install 'mlx[cuda13]<0.33'"
    assert cure("fastapi_offline") == "pip install 'fastapi-offline<2' 'uvicorn<1'"
    assert cure("numpy") == "pip install 'numpy<3,>=2.0'"
    assert cure("other") == "install this package again, with its requirements"


def test_a_checkout_names_its_requirements_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert cure("fastapi_offline") == "pip install -r requirements/server.txt"
    monkeypatch.chdir(tmp_path)
    assert Path(cure("mlx").removeprefix("pip install -r ")).samefile(ROOT / "requirements.txt")


def test_t5_models_names_the_folder_of_converted_models(monkeypatch):
    for value, folder in (("", Path("models")), ("~/mine", Path.home() / "mine")):
        monkeypatch.setenv("T5_MODELS", value)
        assert runpy.run_path(installation.__file__)["MODELS"] == folder


def test_mlx_imported_before_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    runpy.run_path(device.__file__)
    assert capsys.readouterr().err.startswith("hint: import from mlx_t5 before mlx;")
