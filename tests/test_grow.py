"""Tests `demo.grow`: a larger model of the published sizes has the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from demo import grow
from demo.widening import SIZES
from mlx_t5.backend import mx
from mlx_t5.disk import BUNDLED
from mlx_t5.network.weights import read_config
from model import load

# Larger than the target in every size; at four times its width no precision is lost.
ODD = dict(zip(SIZES, (3111, 1024, 1103, 5, 71, 4, 5), strict=True))


def logits(folder: Path) -> np.ndarray:
    """Returns a model's logits for two prompts, one of them padded, and arbitrary answers."""
    model, _ = load(folder, "float32")
    ids = mx.array(np.random.default_rng(0).integers(3, 96, (2, 30)))  # all families have 96 ids
    mask = mx.arange(30)[None] < mx.array([[30], [17]])
    return np.array(model(ids, ids[:, ::3], mask))


def difference(folder: Path, source: Path) -> float:
    """Returns the largest difference between two models' logits, in standard deviations.

    Tokens that only the larger model has must have probability zero.
    """
    small, large = logits(source), logits(folder)
    assert np.all(large[..., small.shape[-1] :] < -1000)
    return np.abs(large[..., : small.shape[-1]] - small).max() / small.std()


@pytest.mark.slow
def test_every_family_can_grow(reference, tmp_path):
    """The families include gated, untied and unscaled models, and umT5's bias in every layer."""
    raw = read_config(reference.folder)
    sizes = {name: raw.get(name, raw["num_layers"]) + 5 for name in SIZES}
    grow.grow(reference.folder, tmp_path / "out", sizes)
    assert difference(tmp_path / "out", reference.folder) < 2e-5


def test_the_command_grows_the_target(tmp_path, capsys):
    out = tmp_path / "out"
    sizes = [f"--{name.replace('_', '-')}={size}" for name, size in ODD.items()]
    argv = ["--from", str(BUNDLED / "target"), "--path", str(out), "--dtype", "bfloat16"]
    assert grow.main([*argv, *sizes]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert difference(out, BUNDLED / "target") < 2e-5
    assert {name: read_config(out)[name] for name in SIZES} == ODD
