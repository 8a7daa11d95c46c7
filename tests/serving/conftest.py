"""Fixtures: a thread that serves a fake model, and a browser."""

import os
import shutil

import pytest

from fake_model import drafter, good
from fake_serving import ENDLESS, PATIENCE, Client, Gated, V, hold, until
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.worker import Worker

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NAMES += ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",)
NAMES += ("/Applications/Chromium.app/Contents/MacOS/Chromium",)
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Served:
    """A running thread that serves a model, with methods that submit jobs to it."""

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


@pytest.fixture
def serve():
    """Returns `serve(model=…, …)`: a thread that serves a model; no job may remain at the end."""
    served = []

    def serve(model=None, max_batch=4, max_queue=8, tokenizer=None, start=True, **options):
        model = model or Gated(ENDLESS, V)
        decoder = SpeculativeDecoder(model, drafter(good(model.table), model), tokenizer, 5)
        worker = Worker(lambda: decoder, max_batch, max_queue, Metrics(), **options)
        served.append((worker, model))
        if start:
            worker.start()
            model.calls.clear()
        return Served(worker, decoder, model)

    yield serve
    for worker, model in served:
        if gate := getattr(model, "gate", None):
            gate.set()
        if worker.health()[0] == "ok":
            until(lambda worker=worker: worker.rows == (0, 0))
        assert worker.stop(PATIENCE)


@pytest.fixture(scope="module")
def browser():
    """Starts an installed Chromium; nothing is downloaded."""
    if CHROMIUM is None:
        pytest.skip("no Chromium found: install one (apt, brew), or set CHROMIUM to its path")
    sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Returns `visit(server, **options)`: the page, which must have no errors or foreign loads."""
    contexts, problems = [], []

    def start(server, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        # Requests that end because the page is left are no failures.
        page.on("requestfailed", lambda r: "ABORTED" in r.failure or problems.append(r.url))
        page.on("request", lambda r: r.url.startswith(server.url) or problems.append(r.url))
        page.goto(server.url)
        page.locator("#presets button").first.wait_for()
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []
