"""main.py and server.py under mlx.launch print once, and all ranks end together."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from launching import finish, free_ports, launch, needs_ring
from mlx_t5.names import BUNDLED
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training.draft_folder import save_draft
from model import load
from standard_error import messages

pytestmark = [needs_ring, pytest.mark.slow]
finds_ranks = pytest.mark.skipif(not os.path.isdir("/proc"), reason="finds processes in /proc")
SECONDS = 60  # allowed for short waits; a longer wait is a hang
PROMPT = "fix grammar: She have two cat."
LONG = ["--max-tokens", "100000", "--min-tokens", "100000", "--batch-size", "1"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Returns the folder of a draft that uses the bundled target's encoder."""
    target, _ = load(BUNDLED / "target")
    place = tmp_path_factory.mktemp("drafts") / "draft"
    return str(save_draft(shared_draft(target, 2), BUNDLED / "target", place))


def said(err: str) -> list[str]:
    """Returns the lines of standard error without those of the launcher and of Metal."""
    return [line for line in messages(err) if "[WARN]" not in line]


def ranks_of(started: subprocess.Popen) -> dict[int, int]:
    """Returns the process ids of the ranks by rank number."""
    ranks = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid, number = (
                int(environ.parent.name),
                re.search(rb"\0MLX_RANK=(\d)", environ.read_bytes()),
            )
            if number and os.getsid(pid) == started.pid:
                ranks[int(number[1])] = pid
    return ranks


def begun(*argv: str) -> subprocess.Popen:
    """Starts two ranks and waits until they have begun to write an endless text."""
    started = launch(2, "main.py", "--dtype", "float32", "--prompt", PROMPT, *LONG, *argv)
    assert started.stdout
    hanging = threading.Timer(SECONDS, os.killpg, (started.pid, signal.SIGKILL))
    hanging.start()
    assert started.stdout.read(4), "they hang"
    hanging.cancel()
    return started


def ended(started: subprocess.Popen) -> bool:
    """Returns whether all ranks end within SECONDS."""
    deadline = time.monotonic() + SECONDS
    while ranks_of(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not ranks_of(started)


@finds_ranks
def test_a_killed_rank_ends_all_ranks(draft):
    started = begun("--draft-model", f"{draft}+lookup", "--num-draft", "auto")
    os.kill(ranks_of(started)[1], signal.SIGKILL)
    _, err = finish(started, SECONDS)
    assert "Node with rank 1 exited with code -9" in err, "the launcher's line"
    errors = [line for line in said(err) if line.startswith("error")]  # may be empty
    assert errors in ([], ["error: another rank has ended; start again"])
    assert ended(started)


@finds_ranks
def test_a_server_answers_over_ranks_and_ends_with_rank_0(draft):
    port = free_ports(1)
    options = ["--port", str(port), "--dtype", "float32", "--draft-model", draft]
    options += ["--num-draft", "5"]
    started = launch(2, "server.py", "--model", str(BUNDLED / "target"), *options)
    assert started.stderr
    while line := started.stderr.readline():
        if line.startswith("serving"):
            break
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
        for beams in (1, 2):
            body = {"model": "demo", "prompt": [PROMPT, PROMPT], "num_beams": beams}
            choices = client.post("/v1/completions", json=body).json()["choices"]
            assert [choice["text"] for choice in choices] == ["She has two cats."] * 2
        metrics = client.get("/metrics").text
        assert float(re.search(r"(?m)^t5_accepted_tokens_total (\S+)", metrics)[1]) >= 4
        body = {"prompt": PROMPT, "targets": ["She has two cats.", "She have two cat."]}
        good, bad = client.post("/v1/score", json=body).json()["data"]
        assert good["logprob"] > bad["logprob"]
    os.kill(ranks_of(started)[0], signal.SIGKILL)
    finish(started, SECONDS)
    assert ended(started)


@finds_ranks
def test_ctrl_c_ends_all_ranks():
    started = begun()
    os.killpg(started.pid, signal.SIGINT)  # a terminal signals the whole process group
    finish(started, SECONDS)
    assert ended(started)


def test_ranks_with_unlike_models_end_with_one_line(tmp_path):
    """A shell command gives rank 1 the folder of a different model."""
    other = shutil.copytree(BUNDLED / "target", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, main\n"
        "if os.environ['MLX_RANK'] == '1':\n"
        f"    sys.argv[2] = {str(other)!r}\n"
        "sys.exit(main.main())\n"
    )
    options = ["--draft-model", "none", "--prompt", PROMPT, *LONG]
    started = launch(2, str(script), "--model", str(BUNDLED / "target"), *options)
    _, err = finish(started, SECONDS)
    (line,) = said(err)
    assert line.startswith("error: rank 1 has another config of the target than rank 0; start all")


def test_a_document_is_decoded_by_ranks_that_share_a_model(draft, tmp_path):
    """Rank 0 reads the document and writes the output."""
    name, out = tmp_path / "in.txt", tmp_path / "out.txt"
    name.write_bytes(b"She have two cat. I has a dog.\r\n\r\n***\r\n")
    options = ["--draft-model", draft, "--split", "sentences", "--prefix", "fix grammar: "]
    options += ["--dtype", "float32", "--num-draft", "5", "--input-file", str(name)]
    _, err = finish(launch(2, "main.py", *options, "--output-file", str(out)), SECONDS)
    assert out.read_bytes() == b"She has two cats. I have a dog.\r\n\r\n***\r\n"
    assert "2 pieces · " in err
