"""Command line: serves a model through an HTTP API and a web page.

    python server.py                                       # the bundled models, on 127.0.0.1:8080
    python server.py --model t5-11b --draft-model t5-small
    python server.py --host 0.0.0.0 --api-key SECRET

After SIGTERM or Ctrl-C the server finishes the running requests; a second Ctrl-C ends it at once.
The exit status is 0 after SIGTERM, 130 after Ctrl-C, and 2 for bad input (one line `error: …`).
"""

from mlx_t5.server import main as main
from mlx_t5.server import run_and_exit

if __name__ == "__main__":
    run_and_exit()
