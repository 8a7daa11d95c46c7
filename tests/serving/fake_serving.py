"""A model that waits, a client of the thread that owns MLX, and plain sockets to a server."""

import json
import queue
import socket
import struct
import threading
import time
from dataclasses import replace

from fake_model import FakeModel, random_table, without
from mlx_t5.engine.codec import Job
from mlx_t5.engine.rows import Chunk
from mlx_t5.serving.jobs import GenerationJob

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

    def submit(self, prompts, seed=0, put=None, size=None, document=None, samples=1, **settings):
        names = ("stream", "logprobs", "predictions")
        kind = {name: settings.pop(name) for name in names if name in settings}
        settings = replace(self.decoder.defaults, **settings)
        self.count = len(prompts) * samples
        self.job = GenerationJob(
            size=size or self.count,
            texts=self.count,
            put=put or self.events.put,
            spec=Job(settings, seed, samples // settings.num_return_sequences, **kind),
            prompts=prompts,
            document=document,
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


def raw_request(url: str, path: str, body: dict, key: str | None = None) -> socket.socket:
    """Sends a request over a plain socket without reading the answer; returns the socket."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
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
