"""Tests the server's command line: refused options, and how it ends."""

import signal
import socket
import subprocess
import sys

import pytest

import mlx_t5.cli.server_command as command
from fake_serving import idle_service
from mlx_t5.cli.server_command import listener as listening
from mlx_t5.convert import convert
from mlx_t5.server import main
from mlx_t5.serving.app import create_app
from mlx_t5.serving.metrics import Metrics
from serving_process import PATIENCE, ROOT
from standard_error import messages


def test_a_port_in_use_is_reported(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert main(["--port", str(listener.getsockname()[1])]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def test_exact_decoding_needs_a_decoder(tmp_path, capsys):
    folder = convert(str(ROOT / "demo" / "target"), tmp_path / "encoder", encoder_only=True)
    capsys.readouterr()  # what the conversion tells
    assert main(["--port", "0", "--model", str(folder), "--exact"]) == 2
    message = "error: --exact requires a decoder; encoder is an encoder alone\n"
    assert capsys.readouterr().err == message


def test_the_listener_lets_asyncio_send_without_delay():
    with listening("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "or asyncio leaves TCP_NODELAY off"


def test_words_that_are_not_single_tokens_are_refused(capsys):
    assert main(["--port", "0", "--rerank-words", "yes", "nobody"]) == 2
    assert "error: --rerank-words " in capsys.readouterr().err


def test_a_signal_to_end_counts_as_soon_as_the_server_says_that_it_serves(monkeypatch, capsys):
    def app(options, chosen):
        return create_app(idle_service(), Metrics())

    def log(line):
        assert line.startswith("serving demo at http://127.0.0.1:")
        signal.raise_signal(signal.SIGTERM)

    def lost(*_):
        raise AssertionError("nobody handles it")

    monkeypatch.setattr(command, "_application", app)
    monkeypatch.setattr(command, "log", log)
    before = signal.signal(signal.SIGTERM, lost)
    try:
        assert main(["--port", "0"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


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
