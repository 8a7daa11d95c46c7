"""The web application of a server command, and the program that serves it.

Both are slow to import; they are imported while the models are loaded.
"""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from mlx_t5.cli.server_options import ServerOptions
from mlx_t5.serving.app import LAST_SECONDS, create_app
from mlx_t5.serving.limits import RequestLimits
from mlx_t5.serving.metrics import Metrics
from mlx_t5.serving.presets import Presets
from mlx_t5.serving.saved_prompts import SavedPrompts
from mlx_t5.serving.service import Service
from mlx_t5.serving.worker import Worker

HEADERS = [("cache-control", "no-cache")]  # of the page, and for proxies of streams
HEADERS += [("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")]
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def web_application(
    options: ServerOptions,
    worker: Worker,
    limits: RequestLimits,
    name: str,
    presets: Presets,
    saved: SavedPrompts | None,
    metrics: Metrics,
) -> FastAPI:
    """Waits for the worker's models, and returns the application that serves them as `name`."""
    service = Service(worker, limits, name, options.delta, options.log_prompts, presets, saved)
    # Without a key, a web page must not reach this server under a host name of its own.
    hosts = ("*",) if options.api_key or options.no_auth else (options.host, *LOOPBACK_HOSTS)
    origins = [origin.rstrip("/").lower() for origin in options.allow_origin]
    root_path = options.root_path.rstrip("/")
    return create_app(service, metrics, options.api_key, hosts, origins, root_path)


def uvicorn_server(options: ServerOptions, application: FastAPI) -> uvicorn.Server:
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
