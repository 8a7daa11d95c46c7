"""Makes LoRA adapters for tests: with PEFT, and by hand where PEFT would add nothing but time."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

PLAIN = {"peft_type": "LORA", "bias": "none", "r": 1, "lora_alpha": 2, "target_modules": ["q"]}


def by_peft(model: torch.nn.Module, folder: Path, **config) -> dict[str, torch.Tensor]:
    """Saves a random adapter for a model of transformers; returns what PEFT merges it to."""
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
        # As one who loads it merges it.
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder)
        return loaded.merge_and_unload().state_dict()


def by_hand(
    folder: Path, shapes: dict[str, tuple[int, int]], rank: int = 1, **entries
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Saves a random adapter of these layers; returns the matrices A and B of each.

    Args:
        folder: made if it is not there.
        shapes: of the weights (out, in), by the layers' names.
        rank: of all matrices.
        entries: of adapter_config.json, beside `PLAIN`.
    """
    random = np.random.default_rng(0)
    matrices = {
        layer: (
            random.normal(size=(rank, inputs)).astype(np.float32),
            random.normal(size=(outputs, rank)).astype(np.float32),
        )
        for layer, (outputs, inputs) in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{layer}.lora_{part}.weight": matrix
        for layer, pair in matrices.items()
        for part, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, "r": rank, **entries}))
    return matrices
