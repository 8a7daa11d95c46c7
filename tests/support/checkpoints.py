"""Makes checkpoints for tests with torch, in every format of Hugging Face folders."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import safetensors.torch
import torch

from mlx_t5.backend import mx
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import HEAD, tensor_names
from model import expected_parameters

TINY = {
    "model_type": "t5",
    "vocab_size": 40,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
}

FORMATS = ("safetensors", "zip", "legacy")
DTYPES = ("float32", "float16", "bfloat16")


def save(
    state: dict[str, torch.Tensor],
    folder: Path,
    format: str = "safetensors",
    shards: int = 1,
    config: dict | None = None,
) -> Path:
    """Writes `state` into `folder` as Hugging Face would.

    Args:
        state: the tensors by name.
        folder: created if it does not exist.
        format: "safetensors", "zip" (torch >= 1.6) or "legacy" (torch < 1.6).
        shards: the number of files; several files have an index.
        config: the contents of config.json; None writes no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if format == "safetensors" else ("pytorch_model", "bin")
    names = list(state)
    weight_map = {}
    for i in range(shards):
        part = {name: state[name] for name in names[i::shards]}
        file = f"{stem}.{suffix}" if shards == 1 else f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}"
        write(part, folder / file, format)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(state: object, path: Path, format: str) -> Path:
    """Writes one file; safetensors needs separate and contiguous tensors."""
    if format == "safetensors":
        state = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=format == "zip")
    return path


def random_state(config: dict, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Returns random tensors under Hugging Face's names, for a config.json with a tied head."""
    ours = T5Config.from_dict(config)
    shapes = expected_parameters(ours)
    generator = torch.Generator().manual_seed(0)
    return {
        theirs: torch.rand(shapes[name], generator=generator).to(getattr(torch, dtype))
        for theirs, name in tensor_names(ours).items()
        if name != HEAD
    }


def arrays(folder: Path) -> dict[str, mx.array]:
    """Returns every array of an MLX folder by name."""
    result = {}
    for file in folder.glob("*.safetensors"):
        found, metadata = mx.load(str(file), return_metadata=True)
        assert metadata == {"format": "mlx"}
        result |= found
    return result


def views(dtype: str = "float32") -> OrderedDict[str, torch.Tensor]:
    """Returns a state dict that is hard to read: views, ties, a scalar, an empty tensor."""
    torch.manual_seed(0)
    base = torch.randn(6, 8).to(getattr(torch, dtype))
    state = OrderedDict(
        base=base,
        tied=base,
        transposed=base.T,
        inner=base[2:5, 1:7:2],
        cube=base.view(2, 3, 8).permute(2, 0, 1),
        tail=base.view(-1)[41:],
        scalar=base[3, 3],
        parameter=torch.nn.Parameter(torch.randn(5).to(base.dtype)),
        empty=base[:0],
    )
    state._metadata = OrderedDict({"": {"version": 1}})  # torch's modules add this
    return state


def siblings(path: Path) -> set[str]:
    """Returns the names in the folder of a path."""
    return {entry.name for entry in path.parent.iterdir()}


def tiny(folder: Path) -> Path:
    """Makes a small checkpoint without a tokenizer, with needed and useless files beside it."""
    save(random_state(TINY), folder, config=TINY)
    (folder / "generation_config.json").write_text("{}")
    (folder / "tf_model.h5").touch()
    return folder
