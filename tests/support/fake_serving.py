"""Clients of the thread that owns MLX, and a model that waits where a test wants it to."""

import queue
import threading
import time
from dataclasses import replace

from fake_model import FakeModel, random_table, without
from mlx_t5.drafting.costs import Costs
from mlx_t5.serving.jobs import Job, Progress

V = 7
ENDLESS = without(random_table(V), 1)
FLAT = Costs({1: 1.0, 16: 1.0}, {1: 0.1})
PATIENCE = 30  # seconds for what takes none; no test waits so long unless it fails


class Gated(FakeModel):
    """Decodes only while the gate is open; says how many passes wait at it."""

    def __init__(self, table, vocab_size):
        super().__init__(table, vocab_size)
        self.gate, self.arrived = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def decode(self, tokens, cache, offsets):
        self.arrived.release()
        assert self.gate.wait(PATIENCE)
        return super().decode(tokens, cache, offsets)


class Client:
    """Submits jobs and collects their events."""

    def __init__(self, worker, decoder):
        self.worker, self.decoder, self.events = worker, decoder, queue.Queue()

    def submit(self, prompts, seed=0, **wishes):
        job_wishes = {n: wishes.pop(n) for n in ("samples", "stream") if n in wishes}
        settings = replace(self.decoder.defaults, **wishes)
        self.job = Job(prompts, settings, seed, self.events.put, **job_wishes)
        self.worker.submit(self.job)
        return self

    def next(self):
        return self.events.get(timeout=PATIENCE)

    def results(self):
        """Results of all rows, in their order."""
        found = {}
        while len(found) < self.job.size:
            event = self.next()
            assert isinstance(event, Progress), event
            if event.chunk.result:
                found[event.index] = event.chunk.result
        return [found[i] for i in sorted(found)]


def until(condition):
    """Waits for something that another thread is about to do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def hold(model):
    """Stops the engine inside its next pass."""
    while model.arrived.acquire(blocking=False):
        pass
    model.gate.clear()
