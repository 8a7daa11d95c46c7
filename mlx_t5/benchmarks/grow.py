"""Enlarges the bundled target or draft to the size of a real T5, without changing its texts.

    python -m demo.grow --shape t5-base --from demo/target --path models/demo-base

The added parameters cost time and memory, but do not change the logits (widening.py explains why).
The output is a Hugging Face folder, which other tools read like a downloaded model, too.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tqdm import tqdm

from mlx_t5.backend import mx
from mlx_t5.benchmarks.widening import SIZES, Widening
from mlx_t5.checkpoints.checkpoint import Checkpoint, cast
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.names import HEAD, tensors
from mlx_t5.checkpoints.reading import DTYPES, as_array
from mlx_t5.checkpoints.writing import (
    check_output_folder,
    new_model_folder,
    save_weights,
    write_json,
)
from mlx_t5.cli.arguments import Parser, run
from mlx_t5.disk import absolute
from mlx_t5.errors import UserError

SHARD_BYTES = 2_000_000_000


def _shape(d_model: int, d_ff: int, num_heads: int, d_kv: int, layers: int) -> Mapping[str, int]:
    values = 32128, d_model, d_ff, num_heads, d_kv, layers, layers
    return MappingProxyType(dict(zip(SIZES, values, strict=True)))


SHAPES = MappingProxyType(
    {
        "t5-small": _shape(512, 2048, 8, 64, 6),
        "t5-base": _shape(768, 3072, 12, 64, 12),
        "t5-large": _shape(1024, 4096, 16, 64, 24),
        "t5-3b": _shape(1024, 16384, 32, 128, 24),
        "t5-11b": _shape(1024, 65536, 128, 128, 24),
        "custom": MappingProxyType({}),  # the source's own sizes
    }
)


def grow(
    source: str | Path,
    path: str | Path,
    sizes: Mapping[str, int],
    dtype: str = "float32",
    seed: int = 0,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Writes a larger model that computes the same function as a small one.

    Args:
        source: a Hugging Face folder of a T5, such as demo/target.
        path: the folder to write; it appears only when it is complete.
        sizes: the new sizes, by their names in config.json; other sizes do not change.
        dtype: "float32", "bfloat16" or "float16".
        seed: the same seed gives the same bytes.
        overwrite: whether to replace a model at `path`.

    Returns:
        The numbers of parameters of the source and of the larger model.
    """
    source, path = Path(source), absolute(path)
    if seed < 0:
        raise UserError(f"the seed must be 0 or more, not {seed}")
    check_output_folder(path, overwrite, source=source)
    checkpoint = Checkpoint.open(source)
    if checkpoint.is_mlx:
        raise UserError("the source is an MLX folder; grow the Hugging Face original")
    raw, config = checkpoint.raw, checkpoint.config
    sizes = {name: sizes.get(name, getattr(config, name)) for name in SIZES}
    widening = Widening(config, sizes)
    T5Config.from_dict(raw | sizes)  # refuses sizes that no model has
    small = {name: as_array(tensor) for name, tensor in checkpoint.weights.items()}
    table = tensors(widening.result)
    if HEAD not in small:
        del table[HEAD]

    def grown() -> Iterator[tuple[str, mx.array]]:
        for hub_name, (name, shape) in tqdm(table.items(), "growing", disable=None):
            content = widening.tensor(name, shape, name in small)
            # The random numbers depend on the seed and on the tensor's name.
            rng = np.random.default_rng([seed, zlib.crc32(hub_name.encode())])
            old = np.array(small[name].astype(mx.float32)) if name in small else None
            yield (
                hub_name,
                cast(hub_name, mx.array(content.array(old, rng)), getattr(mx, dtype)),
            )

    with new_model_folder(path, overwrite, source) as partial:
        save_weights(partial, grown(), "pt")
        write_json(partial / "config.json", grown_config(raw, widening, dtype))
    large = sum(math.prod(shape) for _, shape in table.values())
    return sum(array.size for array in small.values()), large


def grown_config(raw: dict, widening: Widening, dtype: str) -> dict:
    sizes = {name: getattr(widening.result, name) for name in SIZES}
    changed = {
        **sizes,
        "layer_norm_epsilon": widening.result.layer_norm_epsilon,
        "torch_dtype" if "torch_dtype" in raw else "dtype": dtype,
        "grown_from": {name: getattr(widening.source, name) for name in SIZES},
    }
    return dict(sorted((raw | changed).items()))


def main(argv: Sequence[str] | None = None) -> int:
    return run(lambda: _main(argv), interrupted="interrupted; nothing was written")


def _main(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    options = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    sizes = {**SHAPES[args.shape], **options}
    small, large = grow(args.source, args.path, sizes, args.dtype, args.seed, args.overwrite)
    print(f"{large:,} parameters; {args.source} computes it with {small:,}", file=sys.stderr)
    print(absolute(args.path))
    return 0


def _parser() -> Parser:
    parser = Parser(
        description="Make a model of a real size that computes the same as a small model.",
        epilog="A size given as an option overrides the shape's; custom has the source's sizes.",
    )
    add = parser.add_argument
    add("--shape", default="custom", choices=list(SHAPES), help="default: %(default)s")
    what = "model folder to grow (default: %(default)s)"
    add("--from", dest="source", default="demo/target", help=what)
    add("--path", required=True, help="folder to write")
    add("--dtype", default="float32", choices=DTYPES, help="default: %(default)s")
    what = "seed of the random numbers (default: %(default)s)"
    add("--seed", type=int, default=0, help=what)
    add("--overwrite", action="store_true", help="replace a model at --path")
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
