"""Merges PEFT's LoRA adapters into a model's weights while the weights are read.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) changes a weight W (out, in) to W + s · B @ A,
where B (out, r) and A (r, in) are narrow matrices and s is `LoraConfig.scale`. DoRA
(https://arxiv.org/abs/2402.09353) then scales each row to a learned length. Row i of the result
depends only on W[i], B[i], A and that length, so a weight of any size is merged a few rows at a
time. Like PEFT's `merge_and_unload` on a float32 model, `StoredAdapter` computes in float32; only
the merged weight is rounded.

Here layers have Hugging Face's names, such as `decoder.block.0.layer.0.SelfAttention.q`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.checkpoints.adapter_config import CONFIG, OTHERS, LoraConfig, adapter_folder
from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mlx_t5.checkpoints.folder import write_json
from mlx_t5.checkpoints.output_folder import new_folder
from mlx_t5.checkpoints.quantization import (
    PARTS,
    change_weight,
    changed_settings,
    layer_settings,
)
from mlx_t5.errors import UserError, reason, shown

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_DECODER = "decoder.block."
_WEIGHT, _HEAD = ".weight", "lm_head"
_ENTRIES = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM"}
Shape = tuple[int, ...]


class StoredAdapter:
    """The matrices of an adapter, which are read from its file when they are needed.

    At the end of a `with` block the file is closed.

    Args:
        stored: the adapter's file.
        layers: the layers that the adapter changes.
        config: the adapter's configuration.
    """

    def __init__(self, stored: Checkpoint, layers: Collection[str], config: LoraConfig):
        self._stored, self._layers, self._config = stored, layers, config

    def row_tiles(self, name: str, tiles: Iterable[mx.array]) -> Iterator[mx.array]:
        """Merges the adapter into a weight, a few rows at a time.

        Args:
            name: the weight's Hugging Face name.
            tiles: the weight's rows, in order; all tiles but the last have equally many rows.

        Yields:
            The merged tiles, in float32; or the tiles as given, if the adapter does not change this
            weight.

        Raises:
            UserError: the adapter's file cannot be read.
        """
        layer = name.removesuffix(_WEIGHT)
        if layer not in self._layers:
            yield from tiles
            return
        down, up, length = _tensors(layer)
        a = self._stored.read(down).astype(mx.float32)
        lengths = self._stored.read(length).astype(mx.float32) if self._config.use_dora else None
        row_bytes = self._stored.nbytes(up) // self._stored.shape(up)[0]
        b_tiles: Iterator[mx.array] | None = None
        for rows in tiles:
            b_tiles = b_tiles or self._stored.row_tiles(up, len(rows) * row_bytes)
            b = next(b_tiles).astype(mx.float32)
            # Computed on the CPU, because GPUs may multiply float32 with fewer digits (TF32).
            change = mx.matmul(b, a, stream=mx.cpu) * self._config.scale
            rows = rows.astype(mx.float32) + change
            if lengths is not None:
                norms = mx.linalg.norm(rows, axis=1)
                factors = lengths[: len(rows)] / mx.where(norms > 0, norms, mx.inf)
                rows, lengths = factors[:, None] * rows, lengths[len(rows) :]
            yield rows

    def merged(
        self,
        tensors: Iterable[tuple[str, mx.array]],
        mlx_names: Mapping[str, str],
        names: Collection[str],
        quantization: Mapping[str, Any] | None,
    ) -> Iterator[tuple[str, mx.array]]:
        """Merges the adapter into tensors of an MLX folder; each tensor must be whole, not a shard.

        A quantized weight is quantized again after merging, with the settings that
        `StoredAdapter.quantization` returns.

        Args:
            tensors: pairs of a tensor's name in the MLX folder and its array.
            mlx_names: the names in the MLX folder, keyed by Hugging Face's names.
            names: the names of all tensors in the MLX folder.
            quantization: the entry `quantization` of the folder's config.json; None if absent.

        Yields:
            Pairs of a name in the MLX folder and an array.
        """
        changed = self._changed(mlx_names)
        parts = {path: {f"{path}.{part}" for part in PARTS} & set(names) for path in changed}
        waiting: dict[str, dict[str, mx.array]] = {path: {} for path in changed}
        for name, array in tensors:
            path = name.rpartition(".")[0]
            if path not in changed:
                yield name, array
                continue
            waiting[path][name] = array
            if len(waiting[path]) == len(parts[path]):
                settings = layer_settings(quantization or {}, path)
                merge = partial(self._merge, changed[path] + _WEIGHT)
                yield from change_weight(path, waiting.pop(path), settings, merge).items()

    def quantization(
        self, entry: Mapping[str, Any], mlx_names: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the entry `quantization` of config.json for the tensors that `merged` yields.

        Args:
            entry: the entry `quantization` of the folder's config.json, as it was before merging.
            mlx_names: the names in the MLX folder, keyed by Hugging Face's names.
        """
        settings = {path: layer_settings(entry, path) for path in self._changed(mlx_names)}
        return {**entry, **{path: changed_settings(how) for path, how in settings.items()}}

    def _changed(self, mlx_names: Mapping[str, str]) -> dict[str, str]:
        """Returns the changed layers' Hugging Face names, keyed by the layers' paths in the model.

        `mlx_names` is as in `merged`.
        """
        return {mlx_names[layer + _WEIGHT].removesuffix(_WEIGHT): layer for layer in self._layers}

    def _merge(self, name: str, weight: mx.array) -> mx.array:
        return next(self.row_tiles(name, [weight]))

    def __enter__(self) -> StoredAdapter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stored.close()


def open_adapter(folder: str | Path | None, shapes: Mapping[str, Shape]) -> StoredAdapter:
    """Opens a PEFT adapter for a model.

    If the model is an encoder alone, the adapter's tensors for the decoder are ignored.

    Args:
        folder: the adapter's folder, with adapter_config.json and adapter_model.safetensors or
            .bin; None returns an adapter that changes nothing.
        shapes: the shapes of the model's tensors, keyed by Hugging Face's names.

    Raises:
        UserError: the folder holds no LoRA adapter, or the adapter is damaged, does not fit the
            model, or changes a layer that cannot be merged.
    """
    if folder is None:
        return StoredAdapter(Checkpoint([], {}), (), LoraConfig())
    folder = adapter_folder(folder)
    config = LoraConfig.read(folder)
    weights = {name: s for name, s in shapes.items() if len(s) == 2 and name.endswith(_WEIGHT)}
    layers = {name.removesuffix(_WEIGHT): shape for name, shape in weights.items()}
    whole = any(name.startswith(_DECODER) for name in shapes)
    # A tied output head has no tensor of its own, but an adapter may still name it as a layer.
    targets = config.targets(dict.fromkeys([*layers, *([_HEAD] if whole else [])]))
    for layer in targets:
        if layer.rpartition(".")[2] in OTHERS:
            raise UserError(f"{CONFIG}: LoRA on {layer} cannot be merged here; merge it with PEFT")
    if not targets:
        cause = "target_modules and exclude_modules leave no layer to change"
        raise UserError(f"{folder / CONFIG}: {cause} in this model")
    checkpoint = open_checkpoint(folder, WEIGHTS)
    expected: dict[str, Shape] = {}
    for layer in targets:
        outputs, inputs = layers[layer]
        shapes_of_layer = (config.r, inputs), (outputs, config.r), (outputs,)
        named = list(zip(_tensors(layer), shapes_of_layer, strict=True))
        expected |= dict(named if config.use_dora else named[:2])
    _check(checkpoint, expected, "" if whole else _PREFIX + _DECODER)
    return StoredAdapter(checkpoint, frozenset(targets), config)


def save_adapter(
    path: Path,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, mx.array]],
    overwrite: bool = False,
) -> Path:
    """Writes an adapter folder for PEFT and `open_adapter`; the folder appears when it is complete.

    Args:
        path: the folder, as checked by `check_output_folder`.
        entries: the entries of adapter_config.json, except `peft_type` and `task_type`.
        tensors: for each layer, the LoRA matrices A and B and, with DoRA, the learned lengths of
            the weight's rows; each array is keyed by its name in PEFT.
        overwrite: whether to replace a folder at `path`.

    Returns:
        `path`.

    Raises:
        UserError: `path` was made after it was checked, or cannot be written.
    """
    named = {
        f"{_PREFIX}{layer}.{name}" + _WEIGHT * (array.ndim == 2): array.astype(mx.float32)
        for layer, arrays in tensors.items()
        for name, array in arrays.items()
    }
    try:
        with new_folder(path, overwrite) as partial_folder:
            file = str(partial_folder / WEIGHTS[0])
            mx.save_safetensors(file, named, {"format": "pt"})
            write_json(partial_folder / CONFIG, _ENTRIES | dict(entries))
    except (OSError, RuntimeError) as error:  # MLX raises the latter when a disk is full
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    return path


def _tensors(layer: str) -> list[str]:
    """Returns the names that a layer's tensors have in an adapter's file.

    The three names are those of LoRA's matrix A, LoRA's matrix B and DoRA's vector of row lengths.
    """
    parts = (f"lora_A{_WEIGHT}", f"lora_B{_WEIGHT}", "lora_magnitude_vector")
    return [f"{_PREFIX}{layer}.{part}" for part in parts]


def _check(checkpoint: Checkpoint, expected: Mapping[str, Shape], unused: str) -> None:
    """Raises `UserError` unless the adapter's tensors match its configuration.

    Args:
        checkpoint: the adapter's file.
        expected: the shapes of the expected tensors, by name.
        unused: the prefix of tensors that are ignored; "" ignores none.
    """
    names = set(checkpoint.names)
    for name in checkpoint.names:
        if name not in expected and not (unused and name.startswith(unused)):
            raise UserError(f"the adapter does not fit this model: {_stranger(name)}")
    for name, shape in expected.items():
        if name not in names:
            raise UserError(f"the adapter is incomplete: {name} is missing; fetch it again")
        if checkpoint.shape(name) != shape:
            shapes = f"{checkpoint.shape(name)} instead of {shape}"
            raise UserError(f"the adapter does not fit this model: {name} has shape {shapes}")
        checkpoint.require_readable(name)


def _stranger(name: str) -> str:
    """Returns the part of an error message that says why an adapter's tensor is unexpected."""
    layer = shown(name.removeprefix(_PREFIX).partition(".lora_")[0])
    if layer in OTHERS and ".lora_" in name:
        return f"LoRA on {layer} cannot be merged here; merge it with PEFT"
    if ".lora_magnitude_vector" in name:
        return f"it has DoRA's lengths of {layer}, and its {CONFIG} says nothing of use_dora"
    return f"it has {shown(name)}, and no such layer is a target"
