"""What ranks have to have in common before their first pass.

Ranks with other weights of the same shapes would compute nonsense together, and ranks with other
shapes would wait for each other for ever. So all compare what they were asked and what they read:
small files, the modules of a sentence encoder and adapters whole, and of weights the header and a
sample of every tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_t5.backend import cpu_only, mx
from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.checkpoints.sentence_modules import modules
from mlx_t5.checkpoints.small_files import MODULES, SMALL_FILES
from mlx_t5.network.weights import read_config

SAMPLES = 32  # places of a tensor that are compared, from its first number to its last
NAMES = ("model", "draft_model", "adapter_path")  # options: what they lead to is compared
OUR_OWN = ("converted_from",)  # of config.json: says where a folder is from, which may differ


def common_facts(
    pair: Any, decoder: Any, options: Mapping[str, Any], together: bool = True
) -> dict[str, str]:
    """What ranks have to have in common, so that it does not matter who computes what.

    Args:
        pair: the folders of the models, a `cli.models.Pair`.
        decoder: a `SpeculativeDecoder` with these models.
        options: of the command line, after the model's own wishes.
        together: whether they share the model, and so have to pad alike, as a GPU or as a CPU.

    Raises:
        UserError: a folder cannot be read.
    """
    drafter, own = decoder.drafter, {n: v for n, v in options.items() if n not in NAMES}
    asked = {**own, "num_draft": decoder.defaults.num_draft, "kinds": drafter and drafter.kinds}
    return {
        "version of MLX": mx.__version__,
        "kind of device": str(cpu_only()) if together else "",
        "set of options": _digest(json.dumps(asked, sort_keys=True, default=str).encode()),
        "dtype (see --dtype)": str(decoder.model.dtype),
        "target model": of_model(pair.target),
        "draft model": of_model(pair.draft) if pair.draft else "none",
        "adapter": of_adapter(pair.adapter) if pair.adapter else "none",
    }


def of_model(folder: Path) -> str:
    """A short name of all that is read of a model's folder.

    Raises:
        UserError: it cannot be read.
    """
    config = {name: v for name, v in read_config(folder).items() if name not in OUR_OWN}
    parts = [json.dumps(config, sort_keys=True)]
    parts += [of_file(folder / name) for name in SMALL_FILES if name != "config.json"]
    places = modules(folder) if (folder / MODULES).exists() else []
    parts += [of_adapter(place) for _, place in places if place.resolve() != folder.resolve()]
    with open_checkpoint(folder) as stored:
        for name in stored.names:
            sample = _digest(stored.sample(name, SAMPLES))
            parts.append(f"{name} {stored.dtype(name)} {stored.shape(name)} {sample}")
    return _digest("\n".join(parts).encode())


def of_adapter(folder: Path) -> str:
    """A short name of all files right in a folder, as of an adapter or a dense layer."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    return _digest("\n".join(f"{path.name} {of_file(path)}" for path in files).encode())


def of_file(path: Path) -> str:
    """A short name of what a file holds; "" if there is none."""
    if not path.is_file():
        return ""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            found.update(data)
    return found.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
