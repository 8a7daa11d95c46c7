"""A model that waits, clients and servers without a network, and plain sockets to a server."""

import json
import queue
import socket
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

from starlette.testclient import TestClient

from fake_model import FakeModel, random_table, without
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Chunk
from mlx_t5.serving.app import create_app
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.queue import GenerationJob, JobQueue
from mlx_t5.serving.service import RequestLimits, Service
from mlx_t5.serving.worker import Worker
from mlx_t5.settings import Settings
from mlx_t5.text.prompts import Prompt
from mlx_t5.text.tokenizer import load_tokenizer
from serving_process import Asked

V = 7
ENDLESS = without(random_table(V), 1)
PATIENCE = 30  # seconds; no test waits so long unless it fails
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}


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

    def submit(self, prompts, seed=0, put=None, document=None, samples=1, **settings):
        names = ("stream", "logprobs")
        kind = {name: settings.pop(name) for name in names if name in settings}
        settings = replace(self.decoder.defaults, **settings)
        self.count = len(prompts) * samples
        self.job = GenerationJob(
            texts=self.count,
            put=put or self.events.put,
            request=GenerationRequest(
                settings, seed, samples // settings.num_return_sequences, **kind
            ),
            prompts=[p if isinstance(p, Prompt) else Prompt(p, i) for i, p in enumerate(prompts)],
            document=document,
            of_pieces=document is not None,
        )
        self.worker.jobs.add(self.job)
        return self

    def next(self):
        return self.events.get(timeout=PATIENCE)

    def results(self):
        """Returns the results of all rows in order."""
        results = {}
        while len(results) < self.count:
            event = self.next()
            assert isinstance(event, Chunk), event
            if event.result:
                results[event.index] = event.result
        return [results[i] for i in sorted(results)]


class LocalServer(Asked):
    """A server in this process without a network; a stream is returned when complete."""

    def __init__(self, decoder, name, presets=None, saved=None, api_key=None):
        metrics = Metrics()
        worker = Worker(lambda: decoder, max_batch=2, max_queue=4, metrics=metrics)
        service = Service(worker, RequestLimits(60, 20, 6), name, 0.0, presets=presets, saved=saved)
        self.http = TestClient(create_app(service, metrics, api_key), base_url="http://localhost")

    def __enter__(self):
        self.http.__enter__()
        return self

    def __exit__(self, *error):
        self.http.__exit__(*error)  # stops the thread


def idle_service(presets=None, exact=False, delta=0.0):
    """Returns a service with the bundled tokenizer, but without a thread that decodes."""
    model = SimpleNamespace(
        config=SimpleNamespace(
            vocab_size=3072, n_positions=None, task_prefixes=(), tasks=(), translation_prefix=""
        ),
        dtype="mlx.core.float32",
        pooling=None,
        can_decode=True,
    )
    decoder = SimpleNamespace(
        model=model,
        tokenizer=load_tokenizer(BUNDLED / "target"),
        draft=None,
        copy=None,
        defaults=Settings(num_draft=5),
        exact=exact,
        target=lambda batch_size: SimpleNamespace(width=8),
    )
    worker = SimpleNamespace(start=lambda: decoder, stop=lambda: None, max_batch=4)
    worker.jobs, worker.rows = JobQueue(4, 8, lambda: 0.0), (0, 0)
    worker.health = lambda: ("ok", None)
    return Service(worker, RequestLimits(10, 10, 10), "a model", delta, presets=presets)


def until(condition):
    """Waits until another thread makes a condition true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def hold(model):
    """Stops the engine inside its next pass."""
    while model.arrived.acquire(blocking=False):
        pass
    model.gate.clear()


def raw_request(
    url: str, path: str, body: dict, key: str | None = None, lazy: bool = False
) -> socket.socket:
    """Sends a request over a plain socket without reading the answer; returns the socket.

    The kernel keeps megabytes for a reader, but for a lazy one, with small segments, 50 kB.
    """
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    if lazy:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 500)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    head += [f"Content-Length: {len(content)}"] + ([f"Authorization: Bearer {key}"] if key else [])
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + content)
    return connection


def kill(connection: socket.socket) -> None:
    """Resets a connection, as the end of a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
