"""A program that decodes without a model, for processes that tests start."""

import multiprocessing
import os
import signal

from mlx_t5.benchmarks.peer_programs import Program
from mlx_t5.errors import UserError


class Fake(Program):
    """Writes each source backwards; in CTranslate2's place (`scratch`) it is not installed."""

    def __init__(self, scratch="", fails="", **like_any_program):
        self.fails = fails
        if scratch:
            raise UserError("no such library; install it")

    def describe(self):
        print("libraries talk")
        self.lock = multiprocessing.RLock()
        threads = int(os.environ.get("OMP_NUM_THREADS", 2))
        return {"pid": os.getpid(), "threads": threads, "dtype": "float32", "device": "cpu"}

    def decode(self, prompts, num_draft, max_tokens, batch_size):
        if self.fails == "by raising":
            raise IndexError("list index out of range\nmore")
        if self.fails == "by being killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return [list(reversed(ids))[:max_tokens] for ids in prompts]
