"""Makes checkpoints for tests with torch, in every format of Hugging Face folders."""

import json
from pathlib import Path

import safetensors.torch
import torch

from mlx_t5.backend import mx
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.names import HEAD, tensors

TINY = {
    "model_type": "t5", "vocab_size": 40, "d_model": 64, "d_kv": 16, "d_ff": 128,
    "num_layers": 2, "num_heads": 4,
}  # fmt: skip

FORMATS = ("safetensors", "zip", "legacy")
DTYPES = ("float32", "float16", "bfloat16")


def save(state: dict, folder: Path, format="safetensors", shards=1, config=None) -> Path:
    """Writes `state` into `folder` as Hugging Face would.

    Args:
        state: the tensors of torch by name.
        folder: created if it does not exist.
        format: "safetensors", "zip" (torch >= 1.6) or "legacy" (torch < 1.6).
        shards: the number of files; several files have an index.
        config: the contents of config.json; None writes no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if format == "safetensors" else ("pytorch_model", "bin")
    names, weight_map = list(state), {}
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
    """Writes tensors into one file; copies them first, as safetensors needs contiguous tensors."""
    if format == "safetensors":
        state = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path, _use_new_zipfile_serialization=format == "zip")
    return path


def random_state(config: dict, dtype="float32", noise=0.0, seed=0) -> dict[str, torch.Tensor]:
    """Returns random tensors under Hugging Face's names, for a config.json with a tied head.

    The scale makes texts have many different tokens. The tensors with noise are those of a draft
    that mostly agrees with the model without noise.
    """
    t5_config, state = T5Config.from_dict(config), {}
    base, offset = (torch.Generator().manual_seed(n) for n in (seed, seed + 1))
    names = {hf_name: own for hf_name, own in tensors(t5_config).items() if hf_name != HEAD}
    for hf_name, (name, shape) in names.items():
        weight = torch.randn(shape, generator=base)
        if noise:
            weight += noise * torch.randn(shape, generator=offset)
        scale = 1.0 if "norm" in name or "shared" in name else shape[-1] ** -0.5
        state[hf_name] = (scale * weight).to(getattr(torch, dtype))
    return state


def arrays(folder: Path) -> dict[str, mx.array]:
    """Returns all arrays of an MLX folder, by name."""
    result = {}
    for file in folder.glob("*.safetensors"):
        tensors, metadata = mx.load(str(file), return_metadata=True)
        assert metadata == {"format": "mlx"}
        result |= tensors
    return result


def siblings(path: Path) -> set[str]:
    """Returns the names of everything in the folder that contains a path."""
    return {entry.name for entry in path.parent.iterdir()}


def tiny(folder: Path) -> Path:
    """Makes a small checkpoint without a tokenizer, with needed and useless files beside it."""
    save(random_state(TINY), folder, config=TINY)
    (folder / "generation_config.json").write_text("{}")
    (folder / "tf_model.h5").touch()
    return folder
