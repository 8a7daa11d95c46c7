"""Writes a draft as a model folder, standalone or without the modules shared with its target.

A standalone folder has all tensors, and `model.load` reads it without the target. The other kind of
folder has only the tensors of the draft's decoder and, if the draft has its own vocabulary, the ids
of its tokens. Its config.json names the target (network/sharing.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints import writing
from mlx_t5.checkpoints.checkpoint import ENTRY, cast, keep_float32
from mlx_t5.checkpoints.config import read_config
from mlx_t5.checkpoints.quantization import Quantization, Recipe
from mlx_t5.checkpoints.reading import DTYPES, read_weights, stored_dtype, type_name
from mlx_t5.disk import MODULES, SENTENCE_SETTINGS, absolute
from mlx_t5.model import T5
from mlx_t5.network.draft_vocabulary import TABLE
from mlx_t5.network.sharing import OF_DRAFT, SHARED, target_name


def save_draft(
    draft: T5,
    folder: str | Path,
    output: str | Path,
    standalone: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a draft as a model folder, which appears only when it is complete.

    Args:
        draft: the draft. If it shares no modules with a target, all tensors are written.
        folder: the folder of the draft's target, or of the model from which training started:
            configuration and tokenizer are copied from it.
        output: the folder to write.
        standalone: whether to write the shared tensors too; quantized tensors stay quantized.
        dtype: "bfloat16", "float16" or "float32"; None keeps the type of the weights in `folder`.
        overwrite: whether to replace a model folder at `output`.

    Raises:
        UserError: `output` exists, `folder` is not a model folder, or the disk is full.
    """
    source, path = Path(folder), absolute(output)
    target = draft.shares_with
    whole = standalone or target is None
    writing.check_output_folder(path, overwrite, source=source)
    raw = read_config(source)
    stored = dtype or stored_dtype_of(source)
    with writing.new_model_folder(path, overwrite, source) as partial:
        for name in (MODULES, *SENTENCE_SETTINGS):  # a draft computes no embeddings
            (partial / name).unlink(missing_ok=True)
        names = ("decoder", *(SHARED if whole else ()))
        parts = {n: getattr(draft, n) for n in names if getattr(draft, n, None) is not None}
        of_parts = tree_flatten({name: module.parameters() for name, module in parts.items()})
        table = [(TABLE, draft.d2t)] if TABLE in draft else []
        tensors = ((n, _cast(n, array, getattr(mx, stored))) for n, array in table + of_parts)
        writing.save_weights(partial, tensors, "mlx")
        config = _config(raw, draft, parts, stored)
        if not whole:
            config[ENTRY] = {"model": target_name(source)}
        writing.write_json(partial / "config.json", config)
    return path


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return cast(name, array, mx.float32 if keep_float32(name, dtype) else dtype)


def _config(raw: dict, draft: T5, parts: dict[str, nn.Module], dtype: str) -> dict:
    dropped = ("quantization", "quantization_config", "converted_from", ENTRY, *OF_DRAFT)
    config = {name: value for name, value in raw.items() if name not in dropped}
    for name in OF_DRAFT:
        value = getattr(draft.config, name)
        if value is not None:
            config[name] = value
    # transformers 5 uses the name "dtype".
    config |= {name: dtype for name in ("torch_dtype", "dtype") if name in {"torch_dtype", *raw}}
    layers = {
        f"{part}.{path}".removesuffix("."): Quantization(layer.group_size, layer.bits, layer.mode)
        for part, module in parts.items()
        for path, layer in module.named_modules()
        if "scales" in layer
    }
    if layers:
        (default, _), *_ = Counter(layers.values()).most_common()
        config["quantization"] = config["quantization_config"] = Recipe(default).entry(layers)
    return config


def stored_dtype_of(folder: Path) -> str:
    weights, _ = read_weights(folder)
    name = type_name(stored_dtype(weights) or mx.float32)
    return name if name in DTYPES else "float32"
