"""Measures the memory of a program beyond that of the interpreter with its imports."""

from __future__ import annotations

import functools
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_RUN = f"""
import importlib, sys
sys.path[:0] = {str(ROOT)!r}, {str(Path(__file__).parent)!r}
from peak_memory import peak_resident
program = importlib.import_module(sys.argv[1])
status = program.main(sys.argv[2:]) if sys.argv[2:] else 0
print(peak_resident())
sys.exit(status)
"""


def make(folder: Path, format: str, megabytes: int) -> int:
    """Writes an mT5-shaped checkpoint of about this size; one tensor is a third of it.

    Returns:
        The bytes of the largest tensor.
    """
    import checkpoints  # needs torch, which the measured process must not import

    config = {
        "model_type": "mt5",
        "vocab_size": megabytes * 80,
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 4096,
        "num_layers": max(1, megabytes // 75),
        "num_decoder_layers": 1,
        "num_heads": 16,
        "tie_word_embeddings": True,
    }
    state = checkpoints.random_state(config)
    checkpoints.save(state, folder, format, config=config)
    return max(tensor.numel() * tensor.element_size() for tensor in state.values())


@functools.cache  # the imports are measured only once
def peak(*arguments: str, program: str = "convert") -> int:
    """Returns the peak of resident bytes of a process that imports a program and runs its main().

    Args:
        arguments: the command line; none measures the imports alone.
        program: the module.
    """
    command = [sys.executable, "-c", _RUN, program, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])


def peak_resident() -> int:
    """Returns the peak of resident bytes of this process."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss on Linux starts at the parent's peak when it forked; VmHWM does not.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, "Linux has it"
    return 1024 * int(found[1])
