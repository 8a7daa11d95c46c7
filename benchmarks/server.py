"""`server`: the server under load, a running batch against one request at a time.

Two servers of the same models are started on free loopback ports, one with `--max-batch N` and one
with `--max-batch 1`, which serves its queue one by one. Every client sends its next prompt as soon
as it has the answer to the last one. Both ways get the same prompts, in turns, after a warm-up;
while one is measured, the other has nothing to do. Latency is from sending a request to having read
its answer, waiting in the queue included. The texts are compared; a request's seed is its number.
Sampled texts with `--num-draft auto` are not, as they depend on the size of the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import machine, options, printing, workload
from mlx_t5.cli.arguments import add_number, add_setting, at_least
from mlx_t5.errors import UserError
from mlx_t5.settings import AUTO
from mlx_t5.timing import Ratio, spread

SERVER = Path(__file__).parent.parent / "server.py"
WAYS = SINGLE, BATCHED = ("one at a time", "batched")

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
    """One way of serving, with so many clients.

    Attributes:
        way: one of `WAYS`.
        clients: at the same time.
        requests: of each repeat.
        tokens: generated in each repeat.
        seconds: wall clock of each repeat.
        latencies: seconds of every request, all repeats together.
        different: how many prompts had another text than in the first run at least once.
    """

    way: str
    clients: int
    requests: int
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    different: int = 0

    @property
    def throughput(self) -> float:
        """Requests a second, in the median repeat."""
        return self.requests / statistics.median(self.seconds)

    def percentile(self, share: float) -> float:
        """The latency, in seconds, that this share of the requests does not exceed."""
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@contextlib.contextmanager
def serving(argv: Sequence[str]) -> Iterator[str]:
    """A server process; yields its address, `host:port`.

    Raises:
        RuntimeError: it did not start; the message is its own.
    """
    command = [sys.executable, str(SERVER), "--port", "0", *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    try:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at http://(\S+)", line):
                break
        else:
            raise RuntimeError("".join(lines).strip())
        # What it writes from now on has to go somewhere, or it would wait for a reader.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found.group(1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def send_all(
    address: str, prompts: Sequence[str], clients: int, options: dict
) -> tuple[float, list[float], list[dict]]:
    """Sends all prompts, with so many clients at a time.

    Returns:
        Wall clock in seconds, the latency of each request, and the answers.
    """
    waiting = iter(enumerate(prompts))
    lock = threading.Lock()
    latencies: list[float] = [0.0] * len(prompts)
    answers: list[dict] = [{}] * len(prompts)

    def client() -> None:
        connection = http.client.HTTPConnection(address)
        while True:
            with lock:
                i, prompt = next(waiting, (None, ""))
            if i is None:
                connection.close()
                return
            began = time.perf_counter()
            body = json.dumps({"prompt": prompt, "seed": i, **options})
            connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            latencies[i] = time.perf_counter() - began
            if response.status != 200:
                raise RuntimeError(answer["error"]["message"])
            answers[i] = answer

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(client) for _ in range(clients)]:
            future.result()
    return time.perf_counter() - began, latencies, answers


def measure(
    addresses: dict[str, str],
    prompts: list[str],
    clients: Sequence[int],
    options: dict,
    repeats: int,
) -> list[Measurement]:
    """Loads every server with every number of clients, in turns."""
    measured = {(n, way): Measurement(way, n, len(prompts)) for n in clients for way in addresses}
    changed: dict[tuple[int, str], set[int]] = {key: set() for key in measured}
    for address in addresses.values():
        send_all(address, prompts[: 2 * max(clients)], max(clients), options)
    texts: list[str] = []
    for _ in range(repeats):
        for n, way in measured:
            seconds, latencies, answers = send_all(addresses[way], prompts, n, options)
            one = measured[n, way]
            one.seconds.append(seconds)
            one.latencies += latencies
            one.tokens = sum(answer["stats"]["generated_tokens"] for answer in answers)
            own = [answer["text"] for answer in answers]
            texts = texts or own
            changed[n, way] |= {i for i, text in enumerate(own) if text != texts[i]}
            one.different = len(changed[n, way])
    return list(measured.values())


def table_rows(measured: Sequence[Measurement]) -> list[dict]:
    """The figures of every measurement; the speed-up is over serving one at a time."""
    single = {one.clients: one.seconds for one in measured if one.way == SINGLE}
    return [
        {
            **asdict(one),
            "requests_per_second": one.throughput,
            "tokens_per_second": one.tokens / one.requests * one.throughput,
            "speed_up": throughput_ratio(single[one.clients], one.seconds),
            "p50": one.percentile(0.5),
            "p95": one.percentile(0.95),
        }
        for one in measured
    ]


def throughput_ratio(base: Sequence[float], seconds: Sequence[float]) -> Ratio:
    """How many times as fast as `base`, repeat by repeat: median and range."""
    return spread([a / b for a, b in zip(base, seconds, strict=True)])


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if texts differ that are not to."""
    printing.check_writable(args.json)
    prompts = workload.chosen(args.task, args.prompts, args.count).prompts
    settings = {"max_tokens": args.max_tokens, "temperature": args.temp}
    common = ["--num-draft", str(args.num_draft), "--max-queue", str(max(args.clients))]
    for name in ("model", "draft_model", "dtype"):
        if (value := getattr(args, name)) is not None:
            common += ["--" + name.replace("_", "-"), value]
    with contextlib.ExitStack() as stack:
        try:
            addresses = {
                way: stack.enter_context(serving([*common, "--max-batch", str(size)]))
                for way, size in zip(WAYS, (1, args.max_batch), strict=True)
            }
        except RuntimeError as error:
            raise UserError(str(error).removeprefix("error: ")) from None
        facts = machine.environment(served_dtype(addresses[SINGLE]))
        own = {name: getattr(args, name) for name in ("temp", "num_draft", "max_batch")}
        print(printing.header(facts, command, **options.header_fields(args), **own), flush=True)
        rows = table_rows(measure(addresses, prompts, args.clients, settings, args.repeats))
    print(f"\n{printing.markdown(COLUMNS, rows)}")
    printing.write_record(args.json, {"command": command, "environment": facts, "rows": rows})
    may_differ = args.temp > 0 and args.num_draft == AUTO
    return int(any(row["different"] for row in rows) and not may_differ)


def served_dtype(address: str) -> str:
    """What a server's model computes in."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v1/models")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["data"][0]["dtype"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 128, workload.MIXED)
    add = partial(add_number, parser)
    add("--clients", type=at_least(1), default=[1, 4, 16, 64], help="requests at a time")
    add("--max-batch", type=at_least(1), default=8, help="rows decoded at a time")
    add("--num-draft", type=options.num_draft, default=5, help="a number or auto")
    add_setting(parser, "--temp", help="of sampling; 0 is greedy")
    options.add_measuring(parser, 3)
