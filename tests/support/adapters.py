"""Makes LoRA adapters for tests, with PEFT or, where PEFT would only take time, without it."""

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

PLAIN = {"peft_type": "LORA", "bias": "none", "r": 1, "lora_alpha": 2, "target_modules": ["q"]}


def by_peft(model: torch.nn.Module, folder: Path, **config) -> dict[str, torch.Tensor]:
    """Saves a random adapter for a model of transformers; returns the weights that PEFT merged."""
    import peft

    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.2, generator=generator)
        adapted.save_pretrained(folder)
        # Merged as after loading it from the folder.
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
        return loaded.merge_and_unload().state_dict()


def by_hand(folder: Path, shapes: dict, rank: int = 1, **entries) -> dict[str, tuple]:
    """Saves a random adapter for some layers; returns the matrices A and B of each layer.

    Args:
        folder: created if it does not exist.
        shapes: the shapes (out, in) of the weights by layer name.
        rank: the rank of all matrices.
        entries: entries of adapter_config.json, added to `PLAIN`.
    """
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    matrices = {layer: (draw(rank, n), draw(m, rank)) for layer, (m, n) in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{layer}.lora_{part}.weight": matrix
        for layer, pair in matrices.items()
        for part, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, "r": rank, **entries}))
    return matrices
