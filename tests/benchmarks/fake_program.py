"""A program that decodes without a model, for processes that tests start."""

import os
import signal

from benchmarks.peer_programs import Program
from mlx_t5.errors import UserError


class Fake(Program):
    """Writes each source backwards; fails as `fails` says."""

    def __init__(self, fails="", **like_any_program):
        self.fails = fails
        if self.fails == "at start":
            raise UserError("no such library; install it")
        if self.fails == "at import":
            import no_such_library  # noqa: F401

    def describe(self):
        print("libraries talk")
        threads = int(os.environ.get("OMP_NUM_THREADS", 2))
        return {"pid": os.getpid(), "threads": threads, "dtype": "float32", "device": "cpu"}

    def decode(self, prompts, num_draft, max_tokens, batch_size):
        if self.fails == "by raising":
            raise IndexError("list index out of range\nmore")
        if self.fails == "by being killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return [list(reversed(ids))[:max_tokens] for ids in prompts]

    def encode(self, texts):
        return [[len(text), 1] for text in texts]

    def folders(self, scratch):
        return ["target", "draft"]
