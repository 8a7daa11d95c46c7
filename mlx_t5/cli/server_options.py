"""The options of `mlx_t5.server`, and which of them fit together."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import Parser, at_least, option, options_of, switch
from mlx_t5.errors import UserError
from mlx_t5.settings import Range

KEY_VARIABLE = "T5_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The command line of `mlx_t5.server`."""

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
        "append prompts that were decoded to this file, one JSON object a line, to make a "
        "draft from them",
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


def read_server_options(argv: Sequence[str] | None) -> ServerOptions:
    declared = options_of(ServerOptions)
    given = Parser(
        "server",
        "--model google/flan-t5-xl",
        "--model my-t5 --draft-model my-draft --port 8000",
        description="Serve a T5 model over HTTP, as OpenAI's API and as a page. Without options: "
        "the bundled pair at http://127.0.0.1:8080.",
    ).given(declared, argv)
    arguments.refuse(declared, given, (), (("--exact", "--delta"),))
    options = ServerOptions(**{"api_key": os.environ.get(KEY_VARIABLE) or None} | given)
    _check_access(options)
    return options


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


main = partial(arguments.run_command, "server", read_server_options, "")
