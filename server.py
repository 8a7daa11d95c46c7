"""Command line: the engine behind an HTTP API and a page.

    python server.py                                       # the bundled pair, on 127.0.0.1:8080
    python server.py --model t5-11b --draft-model t5-small
    python server.py --host 0.0.0.0 --api-key SECRET

Exit status: 0 after SIGTERM, once what was running is finished; 130 after Ctrl-C, likewise; 2 for
bad input (one line `error: …`). A second Ctrl-C does not wait.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mlx_t5.cli.arguments import (
    Parser,
    add_models,
    add_speculation,
    not_installed,
    number,
    open_streams,
)
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    from decoder import SpeculativeDecoder
    from mlx_t5.cli.models import Pair
    from mlx_t5.serving.guard import Guard
    from mlx_t5.serving.metrics import Metrics
    from mlx_t5.serving.service import RequestLimits, Service

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
KEY_VARIABLE = "T5_API_KEY"


def build_parser() -> Parser:
    """All options of the command line."""
    parser = Parser(
        prog="server.py",
        description="Serve a T5 model over HTTP, as OpenAI's API and as a page. Without options: "
        "the bundled pair at http://127.0.0.1:8080.",
        allow_abbrev=False,
    )
    add_models(parser.add_argument_group("models"))
    add_speculation(parser.add_argument_group("defaults of requests"), "--draft-model none")
    _network_options(parser.add_argument_group("network"))
    _limit_options(parser.add_argument_group("limits"))
    return parser


def _network_options(group: argparse._ArgumentGroup) -> None:
    port = number(int, lambda n: 0 <= n < 65536, "a port from 0 to 65535")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; one that others reach needs --api-key (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=port, default=8080, help="0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY_VARIABLE) or None,
        help="that clients have to send as a bearer token (default: the variable "
        f"{KEY_VARIABLE}, which other users of this machine cannot read, or no key)",
    )
    group.add_argument(
        "--no-auth",
        action="store_true",
        help="let others in without a key, and under any name of this machine; they can all use it",
    )
    group.add_argument(
        "--log-prompts", action="store_true", help="log prompts and texts; otherwise never"
    )


def _limit_options(group: argparse._ArgumentGroup) -> None:
    count = number(int, lambda n: n >= 1, "a whole number of at least 1")
    natural = number(int, lambda n: n >= 0, "a whole number of at least 0")

    def add(name: str, default: int, help: str, type=count) -> None:
        group.add_argument(
            name, type=type, default=default, metavar="N", help=f"{help} (default: {default})"
        )

    add("--max-batch", 8, "texts decoded at the same time")
    add("--max-queue", 128, "texts that wait at most; then clients are told to come back", natural)
    add("--max-prompt-tokens", 1024, "longest prompt")
    add("--max-tokens", 1024, "longest text")
    add("--max-body", 1 << 20, "bytes of a request")
    add("--stall-seconds", 60, "time without a step after which /health says that decoding hangs")
    add("--shutdown-seconds", 60, "time to finish what runs when the server is stopped")


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit status.
    """
    open_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    if not (is_loopback(args.host) or args.api_key or args.no_auth):
        parser.error(
            f"others can reach {args.host}: set --api-key, or say --no-auth if all of them may in"
        )
    if args.api_key == "":
        parser.error("--api-key is empty; give a key, or leave it out if none is needed")
    if args.api_key and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", args.api_key):
        parser.error(
            "--api-key: use ASCII characters, no space at its ends: it travels in a header"
        )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ImportError as error:
        parser.error(not_installed(error, "requirements/server.txt"))
    except (UserError, OSError) as error:
        parser.error(str(error))


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(args: argparse.Namespace) -> int:
    import uvicorn  # noqa: F401  (what is missing is to show before models are loaded)

    import mlx_t5.serving.app  # noqa: F401
    from convert import convert
    from mlx_t5.cli import models

    with _listener(args.host, args.port) as listener:
        chosen = models.choose_pair(args.model, args.draft_model, convert)
        application = _application(args, chosen)
        print(chosen.note, file=sys.stderr)
        listener.listen()
        host = f"[{args.host}]" if ":" in args.host else args.host
        where = f"http://{host}:{listener.getsockname()[1]}"
        print(
            f"serving {model_name(chosen)} at {where} · API {where}/v1", file=sys.stderr, flush=True
        )
        _serve(application, listener, args.shutdown_seconds)
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """A socket of this address, so that one in use is known before models are loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: {error.strerror}; give an address") from None
    family, kind, protocol, _, address = found[0]
    # Unless the protocol is named, asyncio leaves TCP_NODELAY off, and answers take 40 ms more.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        message = f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        raise UserError(message) from None
    return listener


def _application(args: argparse.Namespace, chosen: Pair) -> Guard:
    from mlx_t5.serving import api
    from mlx_t5.serving.app import create_app
    from mlx_t5.serving.metrics import Metrics
    from mlx_t5.serving.service import RequestLimits

    metrics = Metrics()
    rows = min(api.MAX_SAMPLES * api.MAX_PROMPTS, args.max_batch + args.max_queue)
    limits = RequestLimits(args.max_prompt_tokens, args.max_tokens, rows)
    service = _service(args, chosen, limits, metrics)
    # Without a key, a browser must not be led here by a name that a page has made up.
    names = None if args.api_key or args.no_auth else is_loopback
    return create_app(service, metrics, args.api_key, args.max_body, names)


def _service(
    args: argparse.Namespace, chosen: Pair, limits: RequestLimits, metrics: Metrics
) -> Service:
    from mlx_t5.serving.service import Service
    from mlx_t5.serving.worker import Worker

    worker = Worker(
        lambda: _load(args, chosen),
        args.max_batch,
        args.max_queue,
        metrics,
        stall_seconds=args.stall_seconds,
    )
    metrics.observe("t5_batch_rows", "Rows being decoded", lambda: worker.rows[0])
    metrics.observe("t5_queue_rows", "Rows waiting for a place", lambda: worker.rows[1])
    metrics.observe("t5_batch_capacity", "Rows decoded at most", lambda: args.max_batch)
    return Service(worker, limits, model_name(chosen), args.num_draft, args.delta, args.log_prompts)


def _load(args: argparse.Namespace, chosen: Pair) -> SpeculativeDecoder:
    from decoder import SpeculativeDecoder
    from mlx_t5.cli.models import load_pair
    from model import load

    target, drafter, tokenizer, other = load_pair(chosen, args.dtype, load)
    return SpeculativeDecoder(target, drafter, tokenizer, args.num_draft, draft_tokenizer=other)


def model_name(chosen: Pair) -> str:
    """What clients call the target: its folder's name, and "demo" for the bundled one."""
    from mlx_t5.cli.models import BUNDLED

    folder = Path(chosen.target).resolve()
    return BUNDLED.name if folder == (BUNDLED / "target").resolve() else folder.name


def _serve(application: Guard, listener: socket.socket, shutdown_seconds: int) -> None:
    import uvicorn

    from mlx_t5.serving.connections import Connection

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                os._exit(INTERRUPTED)  # the second Ctrl-C
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        application,
        log_config=None,
        log_level="warning",
        access_log=False,  # it would show what comes after the question mark of an address
        server_header=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=shutdown_seconds,
    )
    # uvicorn finishes what runs and then raises the signal again, which is to be no death.
    signal.signal(signal.SIGTERM, lambda *_: None)
    Server(config).run(sockets=[listener])


if __name__ == "__main__":
    # Not sys.exit: a thread that still loads models would end in an abort of MLX, or never.
    os._exit(main())
