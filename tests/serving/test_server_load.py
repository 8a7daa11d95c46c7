"""Tests many clients at once, clients that leave, and many requests, on loopback only."""

import asyncio
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn

from fake_serving import idle_service, kill, raw_request
from mlx_t5.benchmarks import workload
from mlx_t5.engine.rows import Chunk, Stats
from mlx_t5.serving.app import create_app
from mlx_t5.serving.metrics import Metrics
from serving_process import Server

pytestmark = pytest.mark.slow
KEY = "key"
LONG = {"prompt": "x", "max_tokens": 1000, "min_tokens": 1000, "temperature": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def endless():
    """Starts a server whose requests all have a key."""
    running = Server("--max-batch", "4", "--max-queue", "4", "--api-key", KEY, key=KEY)
    yield running
    running.close()


# ---- the same texts as alone ---------------------------------------------------------------------


def mixed_requests(count):
    """Yields requests of every kind, in which neighbors differ."""
    for i, prompt in enumerate(workload.held_out(workload.MIXED, count).prompts):
        body = {"prompt": prompt, "max_tokens": (60, 7, 25)[i % 3], "num_draft": i % 7}
        if i % 2:
            body |= {"temperature": (1.0, 2.0)[i // 2 % 2], "seed": i, "n": 1 + i // 4 % 2}
            body |= {"top_p": 0.9} if i % 3 == 0 else {}
        elif i % 8 == 0:
            body |= {"num_draft": "auto"}
        if i % 5 == 0:
            body |= {"delta": 0.3}
        if i % 6 == 0:
            body |= {"stop": [" and", " le"]}
        if i % 9 == 0:
            body |= {"draft": False}
        yield body


def alone(decoder, body):
    """Returns the texts that `generate` writes for a request alone."""
    names = {"temperature": "temp", "n": "num_samples"}
    options = {names.get(name, name): value for name, value in body.items()}
    if options.pop("draft", True) is False or options["num_draft"] == "auto":
        options["num_draft"] = 0  # greedy texts do not depend on num_draft
    results = decoder.generate([options.pop("prompt")], **options)
    return [result.text for result in results]


def ask(server, body, stream):
    """Returns the texts that the server sends."""
    if not stream:
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]
    texts = [""] * body.get("n", 1)
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
    assert line == "" or line == "data: [DONE]"
    return texts


def test_64_clients_with_mixed_settings_get_what_each_would_get_alone(server, decoder):
    bodies = list(mixed_requests(64))
    before = server.metric("t5_step_seconds_count"), server.metric("t5_batch_occupancy_sum")
    with ThreadPoolExecutor(64) as clients:
        calls = [clients.submit(ask, server, b, stream=i % 4 == 1) for i, b in enumerate(bodies)]
        together = [call.result() for call in calls]
    assert together == [alone(decoder, body) for body in bodies]
    steps = server.metric("t5_step_seconds_count") - before[0]
    assert (server.metric("t5_batch_occupancy_sum") - before[1]) / steps > 2, "they share steps"


# ---- clients that go away ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/predict"])
def test_killed_clients_free_their_places(endless, path):
    cancelled = endless.metric("t5_cancelled_rows_total")
    body = LONG | ({"stream": True} if path == "/v1/completions" else {})
    connections = [raw_request(endless.url, path, body, KEY) for _ in range(8)]
    state = {"running": 4, "waiting": 4}
    endless.until(lambda: state.items() <= endless.http.get("/health").json().items())
    if path == "/v1/completions":
        assert connections[0].recv(15) == b"HTTP/1.1 200 OK"
    for connection in connections:
        kill(connection)
    endless.until(endless.idle)
    assert endless.metric("t5_cancelled_rows_total") - cancelled == 8
    assert endless.http.post("/predict", json={"prompt": "x", "max_tokens": 3}).status_code == 200


def test_a_client_that_leaves_before_many_events_are_sent_is_no_line_in_the_log(caplog):
    chunk = Chunk("a", [5], ["target"], ["a"], Stats())
    service = idle_service()
    app = create_app(service, Metrics())

    async def leave():
        server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        body = {"prompt": "x", "stream": True}
        client = raw_request(f"http://{host}:{port}", "/v1/completions", body)
        while not service.worker.jobs.unfinished():
            await asyncio.sleep(0.01)
        (job,) = service.worker.jobs.unfinished()
        job.put(chunk)
        await asyncio.to_thread(client.recv, 15)  # the stream has begun
        kill(client)
        for _ in range(20):
            job.put(chunk)
        server.should_exit = True
        await serving

    asyncio.run(leave())
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_client_that_does_not_read_delays_nobody(endless):
    body = {**LONG, "max_tokens": 400, "min_tokens": 400, "stream": True, "logprobs": 20}  # 250 kB
    lazy = raw_request(endless.url, "/v1/completions", body, KEY, lazy=True)
    endless.until(lambda: endless.http.get("/health").json()["running"] == 1)
    answer = endless.http.post("/predict", json={"prompt": "y", "max_tokens": 20})
    assert answer.json()["stats"]["generated_tokens"] == 20
    endless.until(endless.idle)  # its text is complete but unread
    assert endless.http.get("/health").json()["status"] == "ok"
    kill(lazy)


def whole_answer(connection):
    """Returns all bytes that a server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_graceful_shutdown_finishes_running_requests(endless):
    """The last test of this server, as it ends the server."""
    body = {**LONG, "max_tokens": 200, "min_tokens": 200, "stream": True}
    streams = [raw_request(endless.url, "/v1/completions", body, KEY) for _ in range(5)]
    endless.until(lambda: endless.http.get("/health").json()["waiting"] == 1)
    endless.signal(signal.SIGTERM)
    for connection in streams:
        answer = whole_answer(connection)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"finish_reason":"length"' in answer
    assert endless.wait() == 0
    assert len(endless.lines) == 2 and "Traceback" not in endless.log


def test_unfinished_requests_are_refused_at_shutdown():
    options = ["--draft-model", "none", "--max-batch", "1", "--max-tokens", "99999"]
    server = Server(*options, "--shutdown-seconds", "1")
    inputs = {"input": [[5]] * 128}  # 600 kB as JSON
    lazy = raw_request(server.url, "/v1/embeddings", inputs, lazy=True)
    assert lazy.recv(15) == b"HTTP/1.1 200 OK"
    body = {"prompt": "x", "max_tokens": 99999, "min_tokens": 99999}
    stream = raw_request(server.url, "/v1/completions", body | {"stream": True})
    server.until(lambda: server.http.get("/health").json()["running"] == 1)
    paths = ["/v1/completions", "/predict", "/v1/chat/completions"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    waiting = [raw_request(server.url, path, chat if "chat" in path else LONG) for path in paths]
    server.until(lambda: server.http.get("/health").json()["waiting"] == len(paths))
    server.signal(signal.SIGINT)
    for connection in waiting:
        head, content = whole_answer(connection).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 5" in head
        error = json.loads(content)["error"]
        assert (error["type"], error["message"]) == ("server_error", "the server is shutting down")
    last = whole_answer(stream).rpartition(b"data: ")[2]
    assert json.loads(last.removesuffix(b"\n\n\r\n0\r\n\r\n"))["error"] == error
    assert server.wait() == 130, "as a shell expects after Ctrl-C"
    assert len(server.lines) == 2, "nor does the client that does not read leave an error"
    kill(lazy)
    server.close()


def test_a_second_ctrl_c_does_not_wait():
    server = Server("--draft-model", "none")
    stream = raw_request(server.url, "/v1/completions", LONG | {"stream": True})
    server.until(lambda: server.http.get("/health").json()["running"] == 1)
    server.signal(signal.SIGINT)
    time.sleep(0.2)  # two signals at once would count as one
    server.signal(signal.SIGINT)
    assert server.wait() == 130
    assert "Traceback" not in server.log
    kill(stream)
    server.close()
