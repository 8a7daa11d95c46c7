"""Starts a command so that Ctrl-C is answered in one line while Python still imports modules.

So this file imports next to nothing itself.
"""

import sys
from importlib import import_module


def start(name: str, argv: "list[str] | None") -> int:
    """Runs a command line, by default the process's own; returns the exit status."""
    try:
        from mlx_t5.interrupts import interrupts_deferred

        with interrupts_deferred():
            options = import_module(f"mlx_t5.cli.{name}_options")
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return int(options.main(argv))
