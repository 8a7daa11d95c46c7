"""Tests what clients and /health report if the thread dies or a step hangs."""

import asyncio
import json

import httpx
import pytest

from fake_serving import ENDLESS, PATIENCE, Gated, V, hold, until
from mlx_t5.disk import BUNDLED
from mlx_t5.engine.generation_request import GenerationRequest
from mlx_t5.engine.rows import Chunk, Row
from mlx_t5.serving.api_error import ApiError
from mlx_t5.serving.app import create_app
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.service import RequestLimits, Service
from mlx_t5.text.tokenizer import load_tokenizer


class Died(BaseException):
    """An exception that no part of the thread expects."""


def fail(*_):
    raise Died("of a secret prompt")


# Where the thread dies: with a text to report, with rows that are in no batch yet, or while it
# recovers from a failed step.
DEADLY = {
    "reporting": {"chunk": fail},
    "joining": {"rows": fail},
    "recovering": {"chunk": None, "engine": fail},
}


@pytest.mark.parametrize("broken", DEADLY)
def test_if_the_thread_dies_every_client_is_told(serve, caplog, monkeypatch, broken):
    served = serve(max_batch=2)
    decoder = served.decoder
    hold(served.model)
    clients = [served.submit([[2]], max_tokens=50, stream=True)]
    assert served.model.arrived.acquire(timeout=PATIENCE)
    clients += [served.submit([[3 + i]], max_tokens=50) for i in range(2)]
    assert served.worker.health() == ("ok", None)
    for name, function in DEADLY[broken].items():
        owner = {"engine": decoder, "chunk": Row, "rows": GenerationRequest}[name]
        monkeypatch.setattr(owner, name, function)
    served.release()
    for waiting in clients:
        while isinstance(event := waiting.next(), Chunk):
            pass
        assert event.status == 500
    served.worker._thread.join(PATIENCE)
    status, reason = served.worker.health()
    assert status == "failed" and "has to be restarted" in reason
    with pytest.raises(ApiError, match="has to be restarted"):
        served.submit([[2]])
    assert "Died at" in caplog.text and "secret" not in caplog.text


def test_health_reports_a_dead_thread_and_a_hanging_step_over_http(serve, monkeypatch):
    now, model = [0.0], Gated(ENDLESS, V)
    model.dtype = "mlx.core.float32"
    tokenizer = load_tokenizer(BUNDLED / "target")
    served = serve(model, 1, 8, tokenizer, start=False, clock=lambda: now[0])
    service = Service(served.worker, RequestLimits(10, 1000, 10), "a model", 0.0)
    app = create_app(service, Metrics())
    asyncio.run(die_while_clients_wait(app, served.worker, model, now, monkeypatch))


async def die_while_clients_wait(app, worker, model, now, monkeypatch):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        def ask(**fields):
            body = {"prompt": [2], "max_tokens": 900, **fields}
            return asyncio.create_task(client.post("/v1/completions", json=body))

        now[0] = 1000
        assert (await client.get("/health")).status_code == 200, "there was nothing to do"
        stream = ask(stream=True)
        await asyncio.to_thread(until, lambda: worker.rows == (1, 0))
        await asyncio.to_thread(hold, model)
        waiting = ask()
        await asyncio.to_thread(until, lambda: sum(worker.rows) == 2)
        assert (await client.get("/health")).status_code == 200
        now[0] += 61
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
        assert "no step has ended for 61 s" in answer.json()["reason"]
        model.gate.set()
        await asyncio.to_thread(until, lambda: worker.health() == ("ok", None))
        monkeypatch.setattr(Row, "chunk", fail)
        last = (await stream).text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert (await waiting).status_code == 500
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failed")
        assert (await ask()).status_code == 503
