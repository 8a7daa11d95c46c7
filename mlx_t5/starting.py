"""Starts a command so that Ctrl-C is answered in one line while Python still imports modules, too.

So this file itself imports next to nothing at first.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module

from mlx_t5 import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def start(name: str, argv: list[str] | None) -> int:
    """Runs a command line, by default the process's own; returns the exit status."""
    try:
        with interrupts_deferred():
            options = import_module(f"mlx_t5.cli.{name}_options")
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return int(options.main(argv))


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raises KeyboardInterrupt behind the block, because imports may lose or replace it."""
    import signal
    import threading

    handler, came = signal.getsignal(signal.SIGINT), threading.Event()
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came.is_set():
        raise KeyboardInterrupt
