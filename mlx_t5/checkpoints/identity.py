"""Tells the models of folders apart by their files, without loading them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from mlx_t5.checkpoints.checkpoint import SAFETENSORS, TORCH, open_checkpoint
from mlx_t5.checkpoints.small_files import (
    MODULES,
    SENTENCE_SETTINGS,
    TOKENIZER_BYTES,
    TOKENIZER_FILES,
    read_small,
)

SMALL = ("config.json", *TOKENIZER_FILES, MODULES, *SENTENCE_SETTINGS)


def identity(
    folder: Path,
    small: Iterable[str] = SMALL,
    weights: tuple[str, str] = (SAFETENSORS, TORCH),
) -> str:
    """A short name of what a model folder holds, the same wherever it is copied to.

    Args:
        folder: of a model or an adapter.
        small: the files beside the weights that count, as far as they are there.
        weights: as `open_checkpoint` has them. Of each tensor its name, type and shape count, and
            some of its bytes, from its beginning to its end.

    Raises:
        UserError: a file is damaged or too large, or there are no weights.
    """
    digest = hashlib.sha256()
    for name in small:
        if os.path.exists(folder / name):
            content = read_small(folder / name, TOKENIZER_BYTES)
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
    with open_checkpoint(folder, weights) as checkpoint:
        for name in sorted(checkpoint.names):
            facts = checkpoint.dtype(name), checkpoint.shape(name), checkpoint.sample(name)
            digest.update(repr((name, *facts)).encode())
    return digest.hexdigest()[:32]
