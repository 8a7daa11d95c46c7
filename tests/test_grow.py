"""Tests `demo.grow`: a larger model of the published sizes has the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.benchmarks import grow
from mlx_t5.benchmarks.widening import SIZES
from mlx_t5.checkpoints.config import read_config
from mlx_t5.model import load


def logits(folder: Path) -> np.ndarray:
    """Returns a model's logits for two prompts, one of them padded, and arbitrary answers."""
    model, _ = load(folder, "float32")
    ids = mx.array(np.random.default_rng(0).integers(3, 96, (2, 30)))  # all families have 96 ids
    mask = mx.arange(30)[None] < mx.array([[30], [17]])
    return np.array(model(ids, ids[:, ::3], mask))


@pytest.mark.slow
def test_every_family_can_grow(reference, tmp_path, capsys):
    """The families include gated, untied and unscaled models, and umT5's bias in every layer."""
    raw, out = read_config(reference.folder), tmp_path / "out"
    sizes = {name: raw.get(name, raw["num_layers"]) + 5 for name in SIZES}
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    assert grow.main(["--from", str(reference.folder), "--path", str(out), *options]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert {name: read_config(out)[name] for name in SIZES} == sizes
    small, large = logits(reference.folder), logits(out)
    assert np.all(large[..., small.shape[-1] :] < -1000)  # tokens that only the larger model has
    assert np.abs(large[..., : small.shape[-1]] - small).max() < 2e-5 * small.std()
