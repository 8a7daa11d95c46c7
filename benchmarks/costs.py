"""`costs`: what a pass of the decoder takes the host, for real models' layers and heads.

The widths are small, so that computing is next to nothing and what is left is the handling of
operations by this project and by MLX. A pass over T positions of one row is taken apart: describing
it (`decode` builds MLX's graph), handing it over (`mx.async_eval` encodes that for the device), and
waiting for what is left then. In decoding the three overlap, because layers are handed over while
others are still being described; that is the last column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from benchmarks import machine, printing, workload
from demo.grow import SHAPES
from mlx_t5.backend import mx, on_cpu
from mlx_t5.cli.arguments import add_number, at_least
from mlx_t5.network.config import T5Config
from mlx_t5.network.encoding import encoded
from mlx_t5.network.modules import expect_passes
from mlx_t5.timing import interleave
from model import T5

SHOWN = ("t5-small", "t5-large", "t5-11b")
POSITIONS = (1, 5)  # T
WIDTH = 64  # of states and feed-forward layers, and the vocabulary
SOURCE, SLOTS, OFFSET = 20, 64, 8  # tokens of the prompt, of the cache, and before the pass
WARM_UP = 64  # passes of each before any counts
PARTS = ("describing", "handing over", "waiting", "as decoded")


def _milliseconds(part: str, row: dict) -> str:
    return f"{1e3 * row[part]:.2f}"


COLUMNS: printing.Columns = {
    "decoder of": lambda row: row["shape"],
    "T": lambda row: f"{row['positions']}",
    **{f"{part}, ms": partial(_milliseconds, part) for part in PARTS},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    what = "whose numbers of layers and heads (default: all)"
    parser.add_argument("--shape", choices=SHOWN, nargs="+", default=SHOWN, help=what)
    add_number(parser, "--repeats", type=at_least(1), default=50, help="passes of each that count")
    workload.add_json(parser)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints."""
    printing.check_writable(args.json)
    models = {shape: small_model(shape) for shape in args.shape}
    facts = machine.environment(machine.dtype_of(models[args.shape[0]]))
    rows = measured(models, args.repeats)
    print(f"{printing.header(facts, command)}\n\n{printing.markdown(COLUMNS, rows)}")
    printing.write_record(args.json, {"command": command, "environment": facts, "rows": rows})
    return 0


def small_model(shape: str) -> T5:
    """A model of random weights with the decoder layers and heads of a real one."""
    real = SHAPES[shape]
    widths = dict.fromkeys(("vocab_size", "d_model", "d_ff"), WIDTH)
    # On GPUs the kernels of attention are for heads of real models only.
    widths |= {"d_kv": 8 if on_cpu() else 64, "num_layers": 1}
    model = T5(T5Config.from_dict({"model_type": "t5", **real, **widths}))
    model.set_dtype(mx.float32 if on_cpu() else mx.bfloat16)
    model.join()
    expect_passes(model)
    mx.eval(model.parameters())
    return model


def measured(
    models: dict[str, T5], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """A row for each model and T: seconds of `PARTS`, medians of so many interleaved passes."""
    passes = {(shape, t): one_pass(models[shape], t, clock) for shape in models for t in POSITIONS}
    for take_apart in passes.values():
        for _ in range(WARM_UP):
            take_apart(0)
    rows = []
    for (shape, t), timed in interleave(passes, 1, repeats, len, clock).items():
        taken = zip(*(parts for (parts,) in timed.outcomes), strict=True)
        medians = zip(PARTS, map(statistics.median, taken), strict=True)
        rows.append({"shape": shape, "positions": t, **dict(medians)})
    return rows


def one_pass(model: T5, positions: int, clock: Callable[[], float]) -> Callable[[int], list[float]]:
    """What makes a pass part by part, then another as in decoding; its argument is not used."""
    pad = model.config.pad_token_id
    cache = encoded(model, [[pad] * SOURCE])
    cache.reserve(SLOTS)
    mx.eval(cache.state)
    tokens = mx.full((1, positions), pad, mx.int32)
    described_alone = mock.patch.object(mx, "async_eval", _kept_back)

    def take_apart(turn: int) -> list[float]:
        moments = [clock()]
        with described_alone:
            logits = model.decode(tokens, cache, [OFFSET])
        moments.append(clock())
        mx.async_eval(logits)
        moments.append(clock())
        mx.eval(logits)
        moments.append(clock())
        mx.eval(model.decode(tokens, cache, [OFFSET]))
        moments.append(clock())
        return [after - before for before, after in zip(moments, moments[1:], strict=False)]

    return take_apart


def _kept_back(*arrays: mx.array) -> None:
    """In place of `mx.async_eval`: nothing is handed over, so that describing counts alone."""
