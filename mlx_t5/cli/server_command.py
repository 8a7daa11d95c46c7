"""Serves a model through an HTTP API and a web page: the body of `mlx_t5.server`."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_t5.checkpoints.generation_config import read_generation_config, read_tasks
from mlx_t5.cli.server_options import ServerOptions
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.errors import UserError, log
from mlx_t5.loading import ModelPair, choose_pair
from mlx_t5.scoring.pairs import ranks_by
from mlx_t5.serving.limits import MAX_PROMPTS, MAX_SAMPLES, RequestLimits
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.presets import Presets
from mlx_t5.serving.rerank import named_words
from mlx_t5.serving.saved_prompts import SavedPrompts
from mlx_t5.serving.worker import Worker
from mlx_t5.starting import interrupts_deferred

if TYPE_CHECKING:
    from fastapi import FastAPI


def server_command(options: ServerOptions) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with listener(options.host, options.port) as bound:
        chosen = choose_pair(options.model, options.draft_model, options.adapter_path)
        application = _application(options, chosen)
        notes = chosen.note, *application.state.service.presets.notes
        print(*notes, sep="\n", file=sys.stderr)
        bound.listen()
        host, port, *_ = bound.getsockname()  # the bound address; a host name may have several
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        from mlx_t5.cli.web_server import uvicorn_server

        server = application.state.server = uvicorn_server(options, application)
        # uvicorn finishes running requests and then raises the signal again, which changes nothing.
        signal.signal(signal.SIGTERM, server.handle_exit)
        log(f"serving {model_name(chosen)} at {where} · API {where}/v1")
        server.run(sockets=[bound])
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


def _application(options: ServerOptions, chosen: ModelPair) -> FastAPI:
    target, template = chosen.target, options.translation_prefix
    words = options.rerank_words or named_words(target)
    presets = Presets(tasks=read_tasks(target), translation_prefix=template, rerank_words=words)
    if not options.ignore_generation_config:
        presets = replace(presets, general=read_generation_config(target))
    path, most = options.save_prompts, options.save_prompts_limit
    saved = SavedPrompts(path, most) if path else None
    rows = min(MAX_SAMPLES * MAX_PROMPTS, options.max_batch + options.max_queue)
    limits = RequestLimits(options.max_prompt_tokens, options.max_tokens, rows)
    metrics, load = Metrics(), partial(_load, options, chosen)
    sizes = options.max_batch, options.max_queue
    worker = Worker(load, *sizes, metrics, answers=options.answer_cache)
    worker.load()
    with interrupts_deferred():  # FastAPI, whose import takes as long as loading small models
        from mlx_t5.cli.web_server import web_application
    name = model_name(chosen)
    return web_application(options, worker, limits, name, presets, saved, metrics)


def _load(options: ServerOptions, chosen: ModelPair) -> SpeculativeDecoder:
    decoder = SpeculativeDecoder.load(
        chosen, options.dtype, num_draft=options.num_draft, exact=options.exact
    )
    if options.exact and not decoder.model.can_decode:
        raise UserError(f"--exact requires a decoder; {model_name(chosen)} is an encoder alone")
    if decoder.tokenizer and not ranks_by(decoder.tokenizer, options.rerank_words):
        words = " ".join(options.rerank_words)
        cure = "name the single tokens that the model answers"
        raise UserError(f"--rerank-words {words}: not all are single tokens; {cure}")
    return decoder


def model_name(chosen: ModelPair) -> str:
    """Returns the target's name for clients: its folder's name, or "demo" if it is bundled."""
    folder = Path(chosen.target).resolve()
    return BUNDLED.name if folder == (BUNDLED / "target").resolve() else folder.name
