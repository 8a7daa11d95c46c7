"""Opens model folders, in Hugging Face's format or as convert.py writes them, and fills models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_t5.backend import mx, nn, on_cpu, tree_flatten
from mlx_t5.checkpoints import adapters, reading
from mlx_t5.checkpoints.adapters import LoraAdapter
from mlx_t5.checkpoints.config import T5Config, read_config
from mlx_t5.checkpoints.names import check, select, tensors
from mlx_t5.checkpoints.pooling import Pooling, read_pooling
from mlx_t5.checkpoints.quantization import layer_settings
from mlx_t5.checkpoints.reading import Weights, as_array, read_weights, require_float
from mlx_t5.disk import MODULES, read_object
from mlx_t5.errors import UserError, is_out_of_memory, reason
from mlx_t5.settings import DTYPES
from mlx_t5.text.tokenizer import load_tokenizer

ENTRY = "shares_encoder_with"  # in a draft's config.json: {"model": the target's name}
Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Checkpoint:
    """A model folder whose parts fit together; its tensors are read only when they are used.

    Attributes:
        folder: the folder.
        raw: config.json, with the token ids of generation_config.json and the adapter's entries.
        config: the same, parsed.
        pooling: how to make vectors of texts.
        tokenizer: a transformers tokenizer, or None if the folder has no tokenizer files.
        weights: the tensors by MLX name.
        is_mlx: whether the folder has MLX's format.
        adapter: the adapter to merge, if any.
    """

    folder: Path
    raw: dict[str, Any]
    config: T5Config
    pooling: Pooling
    tokenizer: Any
    weights: Weights
    is_mlx: bool
    adapter: LoraAdapter | None

    @classmethod
    def open(
        cls, folder: Path, adapter: str | Path | None = None, encoder_only: bool = False
    ) -> Checkpoint:
        """Opens a model folder, and a PEFT adapter for it.

        Args:
            folder: a folder with config.json, the weights and optionally a tokenizer.
            adapter: the folder of the adapter.
            encoder_only: whether to leave out a Hugging Face folder's decoder.

        Raises:
            UserError: a file is missing, damaged, or does not fit the others.
        """
        raw = read_config(folder)
        if adapter is not None:
            adapter = adapters.adapter_folder(adapter)
            own = read_object(adapter / adapters.TRANSLATION, default={})
            if "translation_prefix" in own:
                raw["translation_prefix"] = own["translation_prefix"]
        config = T5Config.from_dict(raw)
        shares = raw.get(ENTRY) is not None
        if shares and adapter is not None:
            raise UserError(f"{folder} uses its target's encoder; merge the adapter into that")
        pooling = Pooling()
        if (folder / MODULES).is_file():
            pooling = read_pooling(folder, config.d_model)
        tokenizer = load_tokenizer(folder)
        weights, metadata = read_weights(folder)
        is_mlx = shares or metadata.get("format") == "mlx"
        if not is_mlx:
            weights = select(config, weights, encoder_only)
        lora = None
        if adapter is not None:
            lora = adapters.open_adapter(adapter, tensors(config), weights)
        return cls(folder, raw, config, pooling, tokenizer, weights, is_mlx, lora)

    def model(self, new: Callable[[], Model], dtype: mx.Dtype) -> Model:
        """Fills a model that `new` makes with the weights, merged with the adapter."""
        model, names = new(), set(self.weights)
        quantization = self.raw.get("quantization") if self.is_mlx else None
        if quantization:
            quantize(model, quantization, names)
        if self.is_mlx:  # else `select` has checked names, shapes and types
            parameters = dict(tree_flatten(model.parameters()))
            check(self.weights, {name: array.shape for name, array in parameters.items()})
            for name, array in parameters.items():
                if mx.issubdtype(array.dtype, mx.floating):  # not the packed integers
                    require_float(name, self.weights[name])
        if quantization and self.adapter:
            model = new()  # again, as the layers that the adapter changes get other settings
            quantize(model, self.adapter.quantization(quantization), names)
        fill(model, self.tensors(), dtype)
        return model

    def tensors(self) -> Iterator[tuple[str, mx.array]]:
        """Takes the tensors out of `weights` one by one, merged with the adapter, if any."""
        for name in list(self.weights):
            path = name.rpartition(".")[0]
            if name not in self.weights:
                continue  # it went with another part of its layer
            if self.adapter and path in self.adapter.layers:
                quantization = self.raw.get("quantization") or {}
                yield from self.adapter.merged(path, self.weights, quantization)
            else:
                yield name, as_array(self.weights.pop(name))


def quantize(model: nn.Module, entry: Any, names: set[str]) -> None:
    """Quantizes the layers whose scales are among `names`, as config.json's `entry` says."""

    def settings(path: str, module: nn.Module) -> bool | dict:
        stored = hasattr(module, "to_quantized") and f"{path}.scales" in names
        return entry.get(path, stored) if stored else False

    try:
        nn.quantize(model, **layer_settings(entry, ""), class_predicate=settings)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"config.json: cannot apply its quantization: {reason(error)}") from None


def fill(model: nn.Module, tensors: Iterator[tuple[str, mx.array]], dtype: mx.Dtype) -> None:
    """Sets a model's parameters, one tensor at a time; floats become `dtype` or `keep_float32`."""
    weights = []
    try:
        for name, array in tensors:
            if mx.issubdtype(array.dtype, mx.floating):
                array = array.astype(mx.float32 if keep_float32(name, dtype) else dtype)
            mx.eval(array)
            weights.append((name, array))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"cannot load the weights: {reason(error)}; are they damaged?") from None
    model.load_weights(weights)


def compute_dtype(requested: str | mx.Dtype | None, weights: Mapping[str, Any]) -> mx.Dtype:
    """The type to compute in: `requested`, else float32 on a CPU, else the stored type."""
    if requested is None:
        requested = mx.float32 if on_cpu() else reading.stored_dtype(weights) or mx.float32
    name = reading.type_name(requested) if isinstance(requested, mx.Dtype) else requested
    if name not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {name}")
    return getattr(mx, name)


def keep_float32(name: str, dtype: mx.Dtype) -> bool:
    """Whether a parameter stays in float32: in float16, the outputs of `wo` would overflow."""
    return dtype == mx.float16 and ".wo." in name


def cast(name: str, rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Converts rows of the tensor `name`; refuses numbers that are too large for float16."""
    result = rows.astype(dtype)
    if dtype == mx.float16 and mx.any(mx.isinf(result) & mx.isfinite(rows)).item():
        raise UserError(f"{name} has numbers too large for float16; use bfloat16")
    return result
