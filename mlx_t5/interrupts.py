"""Keeps a Ctrl-C until modules are imported."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raises KeyboardInterrupt behind the block, because imports may lose or replace it."""
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
