"""Command line: serves a model through an HTTP API and a web page.

    python server.py                                       # the bundled models, on 127.0.0.1:8080
    python server.py --model t5-11b --draft-model t5-small
    python server.py --host 0.0.0.0 --api-key SECRET

After SIGTERM or Ctrl-C the server finishes the running requests; a second Ctrl-C ends it at once.
The exit status is 0 after SIGTERM, 130 after Ctrl-C, and 2 for bad input (one line `error: …`).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import Parser, at_least, option, options_of, switch
from mlx_t5.errors import UserError, log
from mlx_t5.settings import Range

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from decoder import SpeculativeDecoder
    from mlx_t5.loading import ModelPair

KEY_VARIABLE = "T5_API_KEY"
HEADERS = [("cache-control", "no-cache")]  # of the page, and for proxies of streams
HEADERS += [("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")]
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The command line of server.py."""

    model: str | None = arguments.MODEL.field()
    draft_model: str | None = arguments.DRAFT_MODEL.field()
    dtype: str | None = arguments.DTYPE.field()
    adapter_path: str | None = arguments.ADAPTER_PATH.field()
    ignore_generation_config: bool = arguments.IGNORE_GENERATION_CONFIG.field()
    translation_prefix: str = arguments.TRANSLATION_PREFIX.field()
    rerank_words: Sequence[str] = option(
        "the model's words for relevant and other documents", (), metavar="YES NO", several=2
    )
    num_draft: int | str = arguments.num_draft("--draft-model none", group="speed").field()
    delta: float = arguments.setting("delta").field()
    exact: bool = arguments.EXACT.field()
    host: str = option(
        "address to listen on; if other machines can reach it, give --api-key too",
        "127.0.0.1",
        group="network",
    )
    port: int = option(
        "port; 0: any free one", 8080, Range(int, 0, 65535, "a port from 0 to 65535")
    )
    api_key: str | None = option(
        "key that clients have to send as a bearer token (default: the environment variable "
        f"{KEY_VARIABLE}, which other users of this machine cannot read; else no key)",
        metavar="KEY",
    )
    no_auth: bool = switch(
        "accept everybody who can reach the address, without a key and under any host name"
    )
    allow_origin: Sequence[str] = option(
        "origin of a web page or browser extension that may use the server, such as "
        "https://app.example.org, or * for all; may be given several times (default: only the "
        "server's own page)",
        (),
        metavar="URL",
        repeated=True,
    )
    root_path: str = option(
        "path under which a proxy shows the server, such as /t5 (default: none)",
        "",
        metavar="PATH",
    )
    log_prompts: bool = switch("log prompts and texts; otherwise never")
    save_prompts: str | None = option(
        "append prompts that were decoded to this file, one JSON object a line, for distill.py "
        "--data",
        metavar="FILE",
    )
    save_prompts_limit: int = option("maximum number of lines in that file", 100_000, at_least(1))
    max_batch: int = option("texts decoded at the same time", 8, at_least(1), group="limits")
    max_queue: int = option(
        "maximum of waiting texts; further requests are refused", 128, at_least(0)
    )
    answer_cache: int = option(
        "finished texts to keep for equal greedy requests; 0 keeps none", 1000, at_least(0)
    )
    max_prompt_tokens: int = option("maximum number of tokens in a prompt", 1024, at_least(1))
    max_tokens: int = option("maximum number of tokens in a text", 1024, at_least(1))
    shutdown_seconds: int = option(
        "seconds to finish running requests when the server is stopped", 60, at_least(1)
    )


def build_parser() -> Parser:
    """Returns the parser with all options."""
    parser = Parser(
        "server.py --model google/flan-t5-xl",
        "server.py --model my-t5 --draft-model my-draft --port 8000",
        prog="server.py",
        description="Serve a T5 model over HTTP, as OpenAI's API and as a page. Without options: "
        "the bundled pair at http://127.0.0.1:8080.",
    )
    arguments.add_options(parser, options_of(ServerOptions))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; None: the process's own arguments.

    Returns:
        The exit status.
    """
    return arguments.run(lambda: _serve(_options(argv)), "requirements/server.txt", interrupted="")


def _options(argv: list[str] | None) -> ServerOptions:
    given = build_parser().given(argv)
    arguments.refuse(options_of(ServerOptions), given, (), (("--exact", "--delta"),))
    options = ServerOptions(**{"api_key": os.environ.get(KEY_VARIABLE) or None} | given)
    _check_access(options)
    return options


def _serve(options: ServerOptions) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    import mlx_t5.serving.app  # noqa: F401  (a missing package shows before models are loaded)
    from mlx_t5 import loading

    with listener(options.host, options.port) as bound:
        chosen = loading.choose_pair(options.model, options.draft_model, options.adapter_path)
        application = _application(options, chosen)
        notes = chosen.note, *application.state.service.presets.notes
        print(*notes, sep="\n", file=sys.stderr)
        bound.listen()
        host, port, *_ = bound.getsockname()  # the bound address; a host name may have several
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        uvicorn_server = application.state.server = _server(options, application)
        # uvicorn finishes running requests and then raises the signal again, which changes nothing.
        signal.signal(signal.SIGTERM, uvicorn_server.handle_exit)
        log(f"serving {model_name(chosen)} at {where} · API {where}/v1")
        uvicorn_server.run(sockets=[bound])
    return 0


def listener(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address, before the models are loaded.

    Raises:
        UserError: the address does not exist, or cannot be bound.
    """
    try:
        # With the protocol, asyncio sets TCP_NODELAY; without it, answers take 40 ms more.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        raise UserError(f"{reason}; choose another --host or --port") from None
    return bound


def _server(options: ServerOptions, application: FastAPI) -> uvicorn.Server:
    import uvicorn

    from mlx_t5.serving.app import LAST_SECONDS

    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        log_config=None,
        log_level="critical",  # any client can cause the rest; the application logs its errors
        access_log=False,  # it would show query strings
        server_header=False,
        headers=HEADERS,
        # Idle connections count, so this is far above what the queue admits.
        limit_concurrency=512 + 4 * (options.max_batch + options.max_queue),
        timeout_keep_alive=75,  # longer than proxies keep idle connections, usually 60 s
        h11_max_incomplete_event_size=32 << 10,  # headers
        timeout_graceful_shutdown=options.shutdown_seconds + LAST_SECONDS,
    )
    return uvicorn.Server(config)


def _check_access(options: ServerOptions) -> None:
    """Refuses an invalid API key, origin or path.

    Without a key, also refuses a host that other machines can reach, unless --no-auth is given.
    """
    try:
        is_local = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        is_local = options.host == "localhost"
    if not (is_local or options.api_key or options.no_auth):
        raise UserError(
            f"others can reach {options.host}: set --api-key, or say --no-auth if all may use it"
        )
    for origin in options.allow_origin:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+/?", origin, re.IGNORECASE):
            use = "use an origin such as https://app.example.org"
            raise UserError(f"--allow-origin: {use}, not {origin!r}")
    if options.root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", options.root_path):
        raise UserError(f"--root-path: use a path such as /t5, not {options.root_path!r}")
    if options.api_key is not None and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", options.api_key):
        cure = "use ASCII characters with no space at its ends"
        raise UserError(f"--api-key is empty or invalid: {cure}")


def _application(options: ServerOptions, chosen: ModelPair) -> FastAPI:
    from mlx_t5.checkpoints.generation_config import read_generation_config, read_tasks
    from mlx_t5.serving import api
    from mlx_t5.serving.app import create_app
    from mlx_t5.serving.metrics import Metrics
    from mlx_t5.serving.rerank import named_words
    from mlx_t5.serving.saved_prompts import SavedPrompts
    from mlx_t5.serving.service import Presets, RequestLimits, Service
    from mlx_t5.serving.worker import Worker

    target, template = chosen.target, options.translation_prefix
    words = options.rerank_words or named_words(target)
    presets = Presets(tasks=read_tasks(target), translation_prefix=template, rerank_words=words)
    if not options.ignore_generation_config:
        presets = replace(presets, general=read_generation_config(target))
    path, most = options.save_prompts, options.save_prompts_limit
    saved = SavedPrompts(path, most) if path else None
    metrics = Metrics()
    rows = min(api.MAX_SAMPLES * api.MAX_PROMPTS, options.max_batch + options.max_queue)
    limits = RequestLimits(options.max_prompt_tokens, options.max_tokens, rows)
    sizes = options.max_batch, options.max_queue
    load = partial(_load, options, chosen)
    worker = Worker(load, *sizes, metrics, answers=options.answer_cache)
    name, delta = model_name(chosen), options.delta
    service = Service(worker, limits, name, delta, options.log_prompts, presets, saved)
    # Without a key, a web page must not reach this server under a host name of its own.
    hosts = ("*",) if options.api_key or options.no_auth else (options.host, *LOOPBACK_HOSTS)
    origins = [origin.rstrip("/").lower() for origin in options.allow_origin]
    root_path = options.root_path.rstrip("/")
    return create_app(service, metrics, options.api_key, hosts, origins, root_path)


def _load(options: ServerOptions, chosen: ModelPair) -> SpeculativeDecoder:
    from decoder import SpeculativeDecoder
    from mlx_t5.loading import load_pair
    from mlx_t5.scoring.pairs import ranks_by

    target, drafter, tokenizer, other = load_pair(chosen, options.dtype)
    if options.exact and not target.can_decode:
        raise UserError(f"--exact requires a decoder; {model_name(chosen)} is an encoder alone")
    if tokenizer and not ranks_by(tokenizer, options.rerank_words):
        raise UserError("--rerank-words are not single tokens of the model; name those it answers")
    return SpeculativeDecoder(
        target, drafter, tokenizer, options.num_draft, draft_tokenizer=other, exact=options.exact
    )


def model_name(chosen: ModelPair) -> str:
    """Returns the target's name for clients: its folder's name, or "demo" if it is bundled."""
    from mlx_t5.disk import BUNDLED

    folder = Path(chosen.target).resolve()
    return BUNDLED.name if folder == (BUNDLED / "target").resolve() else folder.name


if __name__ == "__main__":
    # Not sys.exit: if a thread still loads models, it would abort in MLX or never return.
    os._exit(main())
