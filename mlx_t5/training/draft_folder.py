"""Writes a draft as a model folder, standalone or without the modules shared with its target.

A standalone folder has all tensors, and `model.load` reads it without the target. The other kind of
folder has only the tensors of the draft's decoder and, if the draft has its own vocabulary, the ids
of its tokens. Its config.json identifies the target by a fingerprint (network/sharing.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, nn, tree_flatten
from mlx_t5.checkpoints.checkpoint import open_checkpoint, stored_dtype
from mlx_t5.checkpoints.folder import (
    BLOCK_BYTES,
    SHARD_BYTES,
    into_shards,
    is_model_file,
    new_model_folder,
    write_json,
    write_shards,
)
from mlx_t5.checkpoints.output_folder import check_output_folder, require_apart
from mlx_t5.checkpoints.quantization import Quantization, Recipe
from mlx_t5.checkpoints.small_files import MODULES, SENTENCE_SETTINGS, place
from mlx_t5.checkpoints.stored_tensor import READABLE
from mlx_t5.errors import UserError, reason
from mlx_t5.network.draft_vocabulary import TABLE
from mlx_t5.network.fingerprint import fingerprint
from mlx_t5.network.layers import keep_float32
from mlx_t5.network.sharing import ENTRY, OF_DRAFT, SHARED
from mlx_t5.network.weights import cast, read_config

if TYPE_CHECKING:
    from model import T5


@dataclass(frozen=True)
class Parameter:
    """One array of a model, as it is written to the disk.

    Attributes:
        name: the array's name in the folder.
        array: the values.
        dtype: the type in which the values are stored.
    """

    name: str
    array: mx.array
    dtype: mx.Dtype

    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns a dictionary of one entry, {name: (type, shape)}, for the stored array."""
        return {self.name: (_name(self.dtype), self.array.shape)}

    def chunks(self) -> Iterator[dict[str, mx.array]]:
        """Yields the array in chunks of whole rows; each chunk is a dictionary {name: rows}.

        Raises:
            UserError: a number is too large for the type.
        """
        rows = max(1, BLOCK_BYTES * len(self.array) // max(self.array.nbytes, 1))
        for start in range(0, len(self.array), rows):
            chunk = mx.contiguous(self.array[start : start + rows])
            yield {self.name: cast(self.name, chunk, self.dtype)}


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
        draft: the draft, a `model.T5`. If it shares no modules with a target, `standalone` is
            ignored, and all tensors are written.
        folder: the folder from which configuration and tokenizer are copied. It holds the draft's
            target or, if the draft shares no modules, the model from which training started.
        output: the folder to write.
        standalone: whether to write the shared tensors too; quantized tensors stay quantized.
        dtype: "bfloat16", "float16" or "float32"; None keeps the type of the weights in `folder`.
        overwrite: whether to replace a model folder at `output`.

    Returns:
        The absolute path of the folder written.

    Raises:
        UserError: `output` exists, there is too little disk space, or `folder` is not a model
            folder.
    """
    source, path = Path(folder), place(output)
    target = draft.shares_with
    whole = standalone or target is None
    try:
        require_apart(path, source)
        check_output_folder(path, overwrite, is_model_file)
        raw = read_config(source)
        stored = dtype or stored_dtype_of(source)
        shards = into_shards(_parameters(draft, whole, getattr(mx, stored)), SHARD_BYTES)
        with new_model_folder(path, overwrite, source, shards) as partial:
            for name in (MODULES, *SENTENCE_SETTINGS):  # a draft computes no embeddings
                (partial / name).unlink(missing_ok=True)
            config = _config(raw, draft, stored, whole)
            if not whole and target is not None:
                origin = raw.get("converted_from")
                model = origin.get("model") if isinstance(origin, dict) else None
                made_for = {"model": model or source.resolve().name}
                config[ENTRY] = fingerprint(target) | made_for
            write_shards(partial, shards, Parameter.chunks, "mlx", "writing")
            write_json(partial / "config.json", config)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    return path


def _parameters(draft: T5, whole: bool, dtype: mx.Dtype) -> list[Parameter]:
    """Returns the parameters to write; those shared with the target only if `whole` is true."""
    parts = ("decoder", *(SHARED if whole else ()))
    parameters = [Parameter(TABLE, draft.d2t, draft.d2t.dtype)] if TABLE in draft else []
    for part in parts:
        module = getattr(draft, part, None)
        for name, array in tree_flatten(module.parameters()) if module is not None else ():
            full = f"{part}.{name}"
            if not mx.issubdtype(array.dtype, mx.floating):
                kind = array.dtype
            else:
                kind = mx.float32 if keep_float32(full, dtype) else dtype
            parameters.append(Parameter(full, array, kind))
    return parameters


def _config(raw: dict, draft: T5, dtype: str, whole: bool) -> dict:
    """Returns the content of the draft's config.json; `raw` is that of the source folder."""
    dropped = ("quantization", "quantization_config", "converted_from", ENTRY, *OF_DRAFT)
    config = {name: value for name, value in raw.items() if name not in dropped}
    config |= {n: value for n in OF_DRAFT if (value := getattr(draft.config, n)) is not None}
    config["torch_dtype"] = dtype
    if "dtype" in raw:  # transformers 5 uses this name
        config["dtype"] = dtype
    layers = {
        f"{part}.{path}".removesuffix("."): Quantization(layer.group_size, layer.bits, layer.mode)
        for part in ("decoder", *(SHARED if whole else ()))
        for path, layer in _modules(getattr(draft, part, None))
        if "scales" in layer
    }
    if layers:
        (default, _), *_ = Counter(layers.values()).most_common()
        config["quantization"] = config["quantization_config"] = Recipe(default).entry(layers)
    return config


def _modules(module: nn.Module | None) -> list[tuple[str, Any]]:
    return [] if module is None else module.named_modules()


def stored_dtype_of(folder: Path) -> str:
    """Returns the floating-point type in which a model folder's weights are stored."""
    with open_checkpoint(folder) as checkpoint:
        stored = stored_dtype(checkpoint)
    return stored if stored in READABLE else "float32"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
