"""Clients of the thread that owns MLX, a model that waits, and a server without a network."""

import queue
import threading
import time
from dataclasses import replace

from starlette.testclient import TestClient

from fake_model import FakeModel, random_table, without
from mlx_t5.engine.job import Job
from mlx_t5.engine.rows import Chunk
from mlx_t5.serving.app import create_app
from mlx_t5.serving.jobs import GenerationJob
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.service import Service
from mlx_t5.serving.tokenizing import RequestLimits
from mlx_t5.serving.worker import Worker
from serving_process import Asked

V = 7
ENDLESS = without(random_table(V), 1)
PATIENCE = 30  # seconds; no test waits so long unless it fails


class Gated(FakeModel):
    """A model that decodes only while its gate is open; `arrived` counts its passes."""

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

    def submit(self, prompts, seed=0, put=None, size=None, whole=True, **settings):
        names = ("stream", "logprobs", "predictions")
        kind = {name: settings.pop(name) for name in names if name in settings}
        samples, document = settings.pop("samples", 1), settings.pop("document", False)
        settings = replace(self.decoder.defaults, **settings)
        self.count = len(prompts) * samples
        spec = Job(settings, seed, samples // settings.num_return_sequences, **kind)
        given = [] if document else prompts
        self.job = GenerationJob(given, spec, document, size=size or self.count)
        self.job.put = put or self.events.put
        self.worker.jobs.add(self.job)
        if self.job.document:
            self.worker.jobs.extend(self.job, prompts, whole)
        return self

    def next(self):
        return self.events.get(timeout=PATIENCE)

    def results(self):
        """Returns the results of all rows in order."""
        found = {}
        while len(found) < self.count:
            event = self.next()
            assert isinstance(event, Chunk), event
            if event.result:
                found[event.index] = event.result
        return [found[i] for i in sorted(found)]


class Served:
    """A thread that serves a model, and its clients."""

    def __init__(self, worker, decoder, model):
        self.worker, self.decoder, self.model = worker, decoder, model

    def submit(self, prompts, **options):
        """Returns a client that has submitted these prompts."""
        return Client(self.worker, self.decoder).submit(prompts, **options)

    def submit_held(self, prompts, **options):
        """Does the same as `submit`, but stops the engine inside its first pass until `release`."""
        hold(self.model)
        client = self.submit(prompts, **options)
        assert self.model.arrived.acquire(timeout=PATIENCE)
        return client

    def release(self):
        """Lets the engine continue."""
        self.model.gate.set()


class LocalServer(Asked):
    """A server in this process without a network; a stream is returned when complete."""

    def __init__(self, decoder, name, presets=None):
        metrics = Metrics()
        worker = Worker(lambda: decoder, max_batch=2, max_queue=4, metrics=metrics)
        service = Service(worker, RequestLimits(60, 20, 6), name, 0.0, presets=presets)
        self.http = TestClient(create_app(service, metrics, None), base_url="http://localhost")

    def __enter__(self):
        self.http.__enter__()
        return self

    def __exit__(self, *error):
        self.http.__exit__(*error)  # stops the thread


def until(condition):
    """Waits until a condition holds that another thread fulfils."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def hold(model):
    """Stops the engine inside its next pass."""
    while model.arrived.acquire(blocking=False):
        pass
    model.gate.clear()
