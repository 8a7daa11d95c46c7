"""`server`: measures the server under load, with a running batch and with one request at a time.

Two servers of the same models are started on free loopback ports. With `--max-batch N`, requests
join and leave a running batch. With `--max-batch 1`, requests are served one by one. Every client
sends its next prompt as soon as it has the response to the previous one. After a warm-up, the two
servers are measured in turn with the same prompts; while one is measured, the other is idle.
Latency is the time from sending a request until its response has been read, including the time in
the queue. The texts of the two servers are compared, so a prompt has the same seed on both.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_t5.benchmarks import machine, printing, workload
from mlx_t5.cli.arguments import Option, at_least, num_draft, setting
from mlx_t5.errors import UserError
from mlx_t5.timing import Timed, differing, speed_up

SERVERS = SINGLE, BATCHED = ("one at a time", "batched")

COLUMNS: printing.Columns = {
    "clients": lambda row: str(row["clients"]),
    **printing.WAY,
    "requests/s": lambda row: f"{row['requests_per_second']:.1f}",
    **printing.SPEED,
    "p50 s": lambda row: f"{row['p50']:.3f}",
    "p95 s": lambda row: f"{row['p95']:.3f}",
    **printing.TEXTS,
}


@dataclass
class Measurement:
    timed: Timed = field(default_factory=Timed)
    latencies: list[float] = field(default_factory=list)


@contextlib.contextmanager
def serving(argv: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "mlx_t5.server", "--port", "0", *argv]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"at http://(\S+)", line):
                break
        else:
            raise RuntimeError("".join(lines).strip())
        # The server's later output must be read, or the server would wait once the pipe is full.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield address.group(1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def send_all(
    address: str, prompts: Sequence[str], clients: int, options: dict
) -> tuple[float, list[float], list[dict]]:
    """Sends all prompts; returns the total seconds, each request's latency, and the responses."""
    client = threading.local()

    def send(i: int) -> tuple[float, dict]:
        if not hasattr(client, "connection"):
            client.connection = http.client.HTTPConnection(address)
        connection = client.connection
        began = time.perf_counter()
        body = json.dumps({"prompt": prompts[i], "seed": i, **options})
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        fields = json.loads(response.read())
        latency = time.perf_counter() - began
        if response.status != 200:
            raise RuntimeError(fields["error"]["message"])
        return latency, fields

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        sent = list(pool.map(send, range(len(prompts))))
    latencies, responses = map(list, zip(*sent, strict=True))
    return time.perf_counter() - began, latencies, responses


def measure(
    addresses: dict[str, str],
    prompts: list[str],
    clients: Sequence[int],
    options: dict,
    repeats: int,
) -> dict[tuple[int, str], Measurement]:
    for address in addresses.values():
        send_all(address, prompts[: 2 * max(clients)], max(clients), options)
    measured = {(n, server): Measurement() for n in clients for server in addresses}
    for _ in range(repeats):
        for (n, server), one in measured.items():
            seconds, latencies, responses = send_all(addresses[server], prompts, n, options)
            tokens = sum(response["stats"]["generated_tokens"] for response in responses)
            one.timed.add([(seconds, tokens, [response["text"] for response in responses])])
            one.latencies += latencies
    return measured


def table_rows(measured: dict[tuple[int, str], Measurement]) -> list[dict]:
    first = next(iter(measured.values())).timed.outcomes[0]
    rows: list[dict[str, Any]] = []
    for (clients, server), one in measured.items():
        seconds = [repeat for (repeat,) in one.timed.seconds]
        requests, (p50, p95) = len(first[0]), np.percentile(one.latencies, [50, 95]).tolist()
        of_requests, of_single = (
            Timed(m.timed.seconds, [[requests]] * len(m.timed.seconds))
            for m in (one, measured[clients, SINGLE])
        )
        row = {
            "clients": clients,
            "way": server,
            "requests": requests,
            "requests_per_second": requests / statistics.median(seconds),
            "tokens_per_second": 1 / one.timed.seconds_a_token(),
            "speed_up": speed_up(of_single, of_requests),
            "p50": p50,
            "p95": p95,
            "different": differing(one.timed.outcomes, [first] * len(seconds)),
            "tokens": [tokens for (tokens,) in one.timed.tokens],
            "seconds": seconds,
            "latencies": one.latencies,
        }
        rows.append(row)
    return rows


def run_server(args: argparse.Namespace, command: str) -> int:
    printing.check_writable(args.json)
    prompts = workload.chosen(args.task, args.prompts, args.count).prompts
    settings = {"max_tokens": args.max_tokens, "temperature": args.temp}
    common = ["--num-draft", str(args.num_draft), "--max-queue", str(max(args.clients))]
    common += ["--answer-cache", "0"]  # every repeat sends the same prompts
    for name in ("model", "draft_model", "dtype"):
        if (value := getattr(args, name)) is not None:
            common += ["--" + name.replace("_", "-"), value]
    with contextlib.ExitStack() as stack:
        try:
            addresses = {
                server: stack.enter_context(serving([*common, "--max-batch", str(size)]))
                for server, size in zip(SERVERS, (1, args.max_batch), strict=True)
            }
        except RuntimeError as error:
            raise UserError(str(error).removeprefix("error: ")) from None
        facts = machine.environment(served_dtype(addresses[SINGLE]))
        more = {name: getattr(args, name) for name in ("temp", "num_draft", "max_batch")}
        print(printing.header(facts, command, **workload.header_fields(args), **more), flush=True)
        rows = table_rows(measure(addresses, prompts, args.clients, settings, args.repeats))
    print(f"\n{printing.markdown(COLUMNS, rows)}")
    printing.write_record(args.json, {"command": command, "environment": facts, "rows": rows})
    return int(any(row["different"] for row in rows))


def served_dtype(address: str) -> str:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v1/models")
    response = json.loads(connection.getresponse().read())
    connection.close()
    return response["data"][0]["dtype"]


OPTIONS = {
    **workload.MODELS,
    **workload.prompts(128, workload.MIXED),
    "clients": Option(
        "clients that send requests at the same time",
        (1, 4, 16, 64),
        at_least(1),
        several=True,
        group="load",
    ),
    "max_batch": Option("rows decoded at a time", 8, at_least(1)),
    "num_draft": num_draft(help="proposals per step: a number or auto", default=5),
    "temp": setting("temp", help="temperature of sampling; 0 is greedy"),
    **workload.measuring(3),
}
