"""Computes digests that identify a model or an adapter from its files; no model is loaded."""

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

SAMPLES = 8  # places sampled in each tensor, from its first element to its last
ORIGIN = "converted_from"  # the entry of config.json that records where a folder comes from


def identity(folder: Path) -> str:
    """Returns a digest of a model folder's content; a copy of the folder has the same digest.

    The digest covers the small files, the modules of a sentence encoder, and each tensor: its name,
    type, shape and some of its bytes. It does not cover `converted_from` in config.json.

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
    """Returns a digest of an adapter's configuration and weights, like `identity` of a model."""
    return _of_files(folder, [ADAPTER_CONFIG], ADAPTER_WEIGHTS)[:32]


def _of_files(
    folder: Path,
    small: Iterable[str],
    weights: tuple[str, str] | None,
    root: Path | None = None,
) -> str:
    """Returns a digest of some files in a folder.

    Args:
        folder: the folder.
        small: names of small files; those that do not exist are skipped.
        weights: the names of the weight files, as in `open_checkpoint`; None for no weights.
        root: the model folder, if `folder` is inside it.
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
