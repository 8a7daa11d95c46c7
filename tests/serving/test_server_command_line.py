"""Tests the server's command line: refused options, and how it ends."""

import signal
import socket
import subprocess
import sys

import pytest

import server as command
from convert import convert
from serving_process import PATIENCE, ROOT
from standard_error import messages


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--host", "0.0.0.0"], "set --api-key, or say --no-auth"),
        (["--host", "::"], "set --api-key, or say --no-auth"),
        (["--host", "192.0.2.1"], "set --api-key, or say --no-auth"),
        (["--host", "example.org"], "set --api-key, or say --no-auth"),
        (["--api-key", "é"], "ASCII"),
        (["--api-key", "a key\n"], "ASCII"),
        (["--api-key", " "], "no space"),
        (["--api-key", ""], "--api-key is empty"),
        (["--allow-origin", "app.example.org"], "use an origin such as https://app.example.org"),
        (["--allow-origin", "https://app.example.org/page"], "use an origin such as"),
        (["--root-path", "t5"], "use a path such as /t5"),
        (["--port", "65536"], "a port from 0 to 65535"),
        (["--max-batch", "0"], "at least 1"),
        (["--max-queue", "-1"], "at least 0"),
        (["--num-draft", "0"], "--draft-model none"),
        (["--delta", "2"], "a number from 0 (lossless) to 1"),
        (["--prompt", "x"], "unrecognized"),
        (["--port", "0", "--model", "no/such/folder"], "there is no model folder"),
        (["--port", "0", "--host", "no.such.host.invalid", "--no-auth"], "choose another --host"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.delenv(command.KEY_VARIABLE, raising=False)
    try:
        status = command.main(argv)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_port_in_use_is_reported(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert command.main(["--port", str(listener.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def test_exact_decoding_needs_a_decoder(tmp_path, capsys):
    folder = convert(str(ROOT / "demo" / "target"), tmp_path / "encoder", encoder_only=True)
    assert command.main(["--port", "0", "--model", str(folder), "--exact"]) == 2
    message = (
        "error: encoder is an encoder alone; --exact is for texts that are written, so leave it"
    )
    assert capsys.readouterr().err == f"{message} out\n"


def test_the_listener_lets_asyncio_send_without_delay():
    with command.listener("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "or asyncio leaves TCP_NODELAY off"


@pytest.mark.slow
def test_ctrl_c_ends_a_server_that_is_loading_models():
    code = """
import runpy, sys
from mlx_t5.backend import mx
from mlx_t5 import loading

def load(*_):
    print("loading", file=sys.stderr, flush=True)
    while True:
        mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))

loading.load_pair = load
sys.argv[1:] = ["--port", "0"]
runpy.run_path("server.py", run_name="__main__")
"""
    argv = [sys.executable, "-c", code]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert "loading\n" in process.stderr
    process.send_signal(signal.SIGINT)
    assert (process.wait(PATIENCE), messages(process.stderr.read())) == (130, [])
