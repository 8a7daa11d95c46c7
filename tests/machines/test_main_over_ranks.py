"""main.py and server.py started by mlx.launch: one voice, and an end of all together."""

import os
import re
import signal
import subprocess
import time

import pytest

from launching import finish, launch, needs_ring

pytestmark = needs_ring
PROMPT = "fix grammar: She have two cat."
LONG = ["--max-tokens", "100000", "--min-tokens", "100000", "--batch-size", "1"]


def said(err: str) -> list[str]:
    """What rank 0 has written to standard error, without the launcher's own lines."""
    return [line for line in err.splitlines() if "[WARN]" not in line]


def ranks_of(started: subprocess.Popen) -> dict[int, int]:
    """Process ids of the ranks by their number."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/environ", "rb") as env:
                session, rank = int(stat.read().rsplit(")")[-1].split()[3]), env.read()
        except OSError:
            continue
        number = re.search(rb"(?:^|\0)MLX_RANK=(\d)", rank)
        if session == started.pid and number:
            found[int(number[1])] = int(pid)
    return found


def begun(*argv: str) -> subprocess.Popen:
    """Two ranks that have begun to write a text which takes for ever."""
    started = launch(2, "main.py", "--dtype", "float32", "--prompt", PROMPT, *LONG, *argv)
    assert started.stdout
    assert started.stdout.read(4)
    return started


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="finds processes in /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all(victim):
    started = begun()
    ranks = ranks_of(started)
    os.kill(ranks[victim], signal.SIGKILL)
    _, err = finish(started, 30)
    lost = ["error: rank 1 was lost; start again"] if victim else []
    assert [line for line in said(err) if not line.startswith("target")] == lost
    assert not ranks_of(started)


def test_ctrl_c_ends_all_without_a_hang():
    started = begun()
    os.killpg(started.pid, signal.SIGINT)  # as a terminal sends it
    finish(started, 30)
    deadline = time.monotonic() + 20
    while ranks_of(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ranks_of(started)


def test_an_error_of_another_rank_is_told_in_one_line(tmp_path):
    # The shell that the launcher starts each rank with gives rank 1 another model's name.
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, main\n"
        "if os.environ['MLX_RANK'] == '1':\n"
        "    sys.argv[2] = 'no/such/folder'\n"
        "sys.exit(main.main())\n"
    )
    started = launch(2, str(script), "--model", "demo/target", "--prompt", PROMPT, *LONG)
    _, err = finish(started, 60)
    (line,) = [line for line in said(err) if not line.startswith("target")]
    assert line.startswith("error: rank 1: ") and "no/such/folder" in line


def test_what_ranks_cannot_do_is_refused_in_one_line():
    _, err = finish(launch(3, "main.py", "--prompt", PROMPT), 60)
    lines = said(err)
    assert len(lines) == 1 and "3 ranks cannot share this model: 4 heads" in lines[0]
