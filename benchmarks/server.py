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
import itertools
import json
import platform
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
from importlib.metadata import version
from pathlib import Path

from backend import UserError, device_name
from benchmarks import options, report
from demo import corpus
from draft_length import AUTO
from options import add_models

SERVER = Path(__file__).parent.parent / "server.py"
TASKS = {"translate": 1.0, "fix": 0.0, "both": 0.5}  # share of translations among the prompts
WAYS = ("one at a time", "batched")


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
        same: whether every text was that of the first run.
    """

    way: str
    clients: int
    requests: int
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    same: bool = True

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


def load(
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
    for address in addresses.values():
        load(address, prompts[: 2 * max(clients)], max(clients), options)
    texts: list[str] = []
    for _ in range(repeats):
        for n, way in measured:
            seconds, latencies, answers = load(addresses[way], prompts, n, options)
            one = measured[n, way]
            one.seconds.append(seconds)
            one.latencies += latencies
            one.tokens = sum(answer["stats"]["generated_tokens"] for answer in answers)
            texts = texts or [answer["text"] for answer in answers]
            one.same &= texts == [answer["text"] for answer in answers]
    return list(measured.values())


def table(measured: list[Measurement]) -> str:
    """A Markdown table, one number of clients a row."""
    lines = [
        "| clients | one at a time: requests/s | tokens/s | p50 | p95 "
        "| batched: requests/s | tokens/s | p50 | p95 | throughput (range) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for n, group in itertools.groupby(measured, key=lambda m: m.clients):
        single, batched = group
        cells = [str(n)]
        for m in (single, batched):
            speed = m.tokens / m.requests * m.throughput
            cells += [f"{m.throughput:.1f}", f"{speed:.0f}"]
            cells += [f"{m.percentile(share):.3f} s" for share in (0.5, 0.95)]
        ratios = sorted(a / b for a, b in zip(single.seconds, batched.seconds, strict=True))
        spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {' | '.join(cells)} | {statistics.median(ratios):.2f}× {spread} |")
    return "\n".join(lines)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints; exit status 1 if texts differ that are not to."""
    report.check_writable(args.json)
    stream = corpus.examples(args.seed, held_out=True, translated=TASKS[args.task])
    prompts = [example.source for example in itertools.islice(stream, args.requests)]
    settings = {"max_tokens": 200, "temperature": args.temp}
    common = ["--num-draft", args.num_draft, "--max-queue", str(max(args.clients))]
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
        machine = f"{command}\n{describe(addresses[WAYS[0]], args)}"
        print(machine, flush=True)
        measured = measure(addresses, prompts, args.clients, settings, args.repeats)
    print(table(measured))
    same = all(m.same for m in measured) or (args.temp > 0 and args.num_draft == AUTO)
    print(f"all texts equal: {'yes' if all(m.same for m in measured) else 'NO'}")
    if args.json:
        record = {"machine": machine, "measurements": [asdict(m) for m in measured]}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(not same)


def describe(address: str, args: argparse.Namespace) -> str:
    """One line on what was measured, and on which machine."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]
    connection.close()
    return (
        f"{model['id']}, {args.requests} held-out prompts ({args.task}) a run, temp {args.temp}, "
        f"num_draft {args.num_draft}, max batch {args.max_batch}, {args.repeats} repeats; "
        f"{platform.machine()} {device_name()}, mlx {version('mlx')}, {model['dtype']}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_models(parser.add_argument_group("models"))
    add = parser.add_argument
    add("--task", choices=list(TASKS), default="both", help="default: %(default)s")
    add(
        "--clients",
        type=options.at_least(1),
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="numbers",
    )
    add(
        "--requests",
        type=options.at_least(1),
        default=128,
        help="in each run (default: %(default)s)",
    )
    add("--max-batch", type=options.at_least(1), default=8, help="default: %(default)s")
    add("--num-draft", default="5", help="a number or auto (default: %(default)s)")
    add("--temp", type=options.between(0, 100), default=0.0, help="default: %(default)s")
    add("--seed", default="load", help="of the held-out sample")
    options.add_measuring(parser, 3)
