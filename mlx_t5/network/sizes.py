"""The memory that T5's weights, caches and activations take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mlx_t5.backend import device_memory, mx, on_cpu
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.reading import EMBEDDINGS, Weights, read_weights, type_name
from mlx_t5.errors import readable
from mlx_t5.network.bias import queries_at_once
from mlx_t5.network.cache import round_up
from mlx_t5.settings import DTYPES

MEBIBYTE = 1 << 20
WIDTHS = {name: getattr(mx, name).size for name in DTYPES}


def cache_bytes(
    config: T5Config, width: int, prompts: int, source: int, target: int, rows: int = 0
) -> int:
    """The size of a decoder's cache, with `width` bytes a number; 0 rows: as many as prompts."""
    slots = prompts * source + max(rows, prompts) * round_up(target)
    return 2 * config.num_decoder_layers * config.num_heads * config.d_kv * slots * width


def encoder_bytes(config: T5Config, width: int, rows: int, source: int) -> int:
    """Estimates the peak size of the encoder's activations, with `width` bytes a number."""
    # Five times the sum of one layer's scores (of a chunk), hidden units, residual and heads, as
    # measured on a CPU. Kernels that do not store the scores need less.
    heads = config.num_heads
    scores = heads * min(source, queries_at_once(rows, heads, source))
    features = (1 + config.is_gated_act) * config.d_ff + config.d_model + heads * config.d_kv
    return 5 * width * rows * source * (scores + features)


def folder_bytes(folder: Path, dtype: str | mx.Dtype | None) -> int:
    """The size of a model folder's weights once they are loaded in `dtype`."""
    weights, _ = read_weights(folder)
    return weights_bytes(weights, dtype or ("float32" if on_cpu() else None))


def weights_bytes(weights: Weights, dtype: str | mx.Dtype | None) -> int:
    """The size of weights in the type `dtype`; None keeps their own types."""
    total, requested = 0, None if dtype is None else WIDTHS[str(dtype).removeprefix("mlx.core.")]
    for name, tensor in weights.items():
        if name in EMBEDDINGS[1:] and EMBEDDINGS[0] in weights:
            continue  # another copy of the embedding
        width = WIDTHS.get(type_name(tensor.dtype))  # None for the integers of quantized weights
        total += math.prod(tensor.shape) * (requested or width) if width else tensor.nbytes
    return total


def warning(folders: Sequence[Path], dtype: str | None) -> str | None:
    """A warning if the models' weights barely fit into memory or do not fit, else None."""
    needed, there = sum(folder_bytes(folder, dtype) for folder in folders), device_memory.limit()
    facts = device_memory.device_info()
    # Near macOS's recommended limit the GPU slows down; it can be raised if the machine has more.
    comfortable = device_memory.SHARE * there if facts.get(device_memory.WORKING_SET) else there
    if needed <= comfortable:
        return None
    cure = "convert the model with --quantize, or take a smaller one"
    space = f"there are {readable(there)} of memory"
    if facts.get(device_memory.WORKING_SET):
        space = f"macOS recommends at most {readable(there)} for the GPU (iogpu.wired_limit_mb)"
        raised = math.ceil(needed / device_memory.SHARE / MEBIBYTE)
        if raised * MEBIBYTE < device_memory.SHARE * facts.get("memory_size", 0):
            cure += (
                f", or raise that until the next start: sudo sysctl iogpu.wired_limit_mb={raised}"
            )
    return f"the weights take {readable(needed)}, and {space}; {cure}"
