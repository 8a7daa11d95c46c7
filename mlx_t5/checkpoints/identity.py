"""Tells the models of folders apart by their files, without loading them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from mlx_t5.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mlx_t5.checkpoints.adapters import WEIGHTS as ADAPTER_WEIGHTS
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, TORCH, open_checkpoint
from mlx_t5.checkpoints.sentence_modules import CONFIG, modules
from mlx_t5.checkpoints.small_files import (
    MODULES,
    SMALL_FILES,
    TOKENIZER_BYTES,
    read_object,
    read_small,
)

SAMPLES = 8  # places of a tensor that count, from its first number to its last
ORIGIN = "converted_from"  # of config.json: where a folder is from, which may differ


def identity(folder: Path) -> str:
    """A short name of what a model folder holds, the same wherever it is copied to.

    The small files count whole, but for where config.json says that it is from; of each tensor its
    name, type and shape, and some of its bytes; and the modules of a sentence encoder likewise.

    Raises:
        UserError: a file is damaged or too large, or there is no config.json or no weights.
    """
    config = read_object(folder / CONFIG, "give a model folder, MLX or Hugging Face")
    config.pop(ORIGIN, None)
    names = [name for name in SMALL_FILES if name != CONFIG]
    facts = [json.dumps(config, sort_keys=True), _of_files(folder, names, (SAFETENSORS, TORCH))]
    for kind, module in modules(folder) if os.path.lexists(folder / MODULES) else ():
        if module != folder:
            weights = (SAFETENSORS, TORCH) if kind == "Dense" else None
            facts.append(_of_files(module, [CONFIG], weights, folder))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def adapter_identity(folder: Path) -> str:
    """`identity` of a PEFT adapter: its configuration and its weights."""
    return _of_files(folder, [ADAPTER_CONFIG], ADAPTER_WEIGHTS)[:32]


def _of_files(
    folder: Path,
    small: Iterable[str],
    weights: tuple[str, str] | None,
    root: Path | None = None,
) -> str:
    """A digest of small files, as far as they are there, and of weights of these names, if any.

    `root` is the model folder, if `folder` is one in it.
    """
    digest = hashlib.sha256()
    for name in small:
        if os.path.lexists(folder / name):
            content = read_small(folder / name, TOKENIZER_BYTES, root)
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    if weights:
        with open_checkpoint(folder, weights, root) as stored:
            for name in sorted(stored.names):
                facts = stored.dtype(name), stored.shape(name), stored.sample(name, SAMPLES)
                digest.update(repr((name, *facts)).encode())
    return digest.hexdigest()
