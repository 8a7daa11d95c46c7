"""The row that `report` makes: the columns of the table in docs/measuring.md."""

from __future__ import annotations

from typing import Any

from benchmarks import printing
from mlx_t5.sizes import readable

SHOWN = (2, 4, 5, 6, 8, 11, 16)  # positions M of v(M); one that was not measured is "–"


def chip(record: dict[str, Any]) -> str:
    """The chip, and a GPU that is not part of it."""
    own, gpu = record["hardware"]["chip"], record["hardware"]["gpu"]
    return own if gpu in (None, own) else f"{own}, {gpu}"


def computes_on(record: dict[str, Any]) -> str:
    """The GPU's cores where MLX knows them, or the CPU's and its BLAS."""
    environment, cores = record["environment"], record["hardware"]["gpu_cores"]
    if environment["device"] == "cpu":
        return f"CPU, {environment['cores']} cores, {environment['blas']}"
    return f"GPU, {cores} cores" if cores else "GPU"


def weights(record: dict[str, Any]) -> str:
    """What the target computes in, and its bits a weight where it is quantised."""
    bits, dtype = record["target"]["bits"], record["environment"]["dtype"]
    return f"{' and '.join(map(str, bits))} bits, {dtype}" if bits else dtype


def ladder(record: dict[str, Any]) -> str:
    """v(M) at `SHOWN`."""
    v = record["v"]
    return " ".join(f"{v[m]:.2f}" if m in v else "–" for m in SHOWN)


def exact(record: dict[str, Any]) -> str:
    """Whether exact decoding keeps its promise."""
    return "holds" if record["exact"]["holds"] else "no"


COLUMNS: printing.Columns = {
    "date": lambda record: record["date"],
    "chip": chip,
    "computes on": computes_on,
    "memory": lambda record: readable(record["hardware"]["memory_bytes"] or 0),
    "system": lambda record: record["hardware"]["system"],
    "mlx": lambda record: record["environment"]["mlx"],
    "target, draft": lambda record: f"{record['target']['name']}, {record['draft']['name']}",
    "weights": weights,
    f"v at {' '.join(map(str, SHOWN))}": ladder,
    "c": lambda record: f"{record['c']:.3f}",
    "α": lambda record: f"{record['alpha']:.3f}",
    "γ (best by v)": lambda record: f"{record['num_draft']} ({record['best_num_draft']})",
    "tokens/call": lambda record: f"{record['tokens_per_call']:.2f}",
    "regular tokens/s": lambda record: f"{record['regular_tokens_per_second']:.1f}",
    "speed-up (range)": lambda record: str(record["speed_up"]),
    "drift": lambda record: f"{record['drift']:+.0%}",
    "prompts": lambda record: f"{record['prompts']}",
    "texts": lambda record: printing.texts(record["different"]),
    "peak memory": lambda record: readable(record["peak_memory_bytes"]),
    "exact decoding": exact,
}


def table(record: dict[str, Any]) -> str:
    """The row with its header, in Markdown."""
    return printing.markdown(COLUMNS, [record])
