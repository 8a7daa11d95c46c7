"""The modules of a folder of sentence-transformers: their list, and copies of them.

modules.json lists a Transformer, which is the folder itself, and what turns its states into a
vector, each with a folder of its own: `1_Pooling/config.json`, `2_Dense/config.json` and its
weights, `3_Normalize`. All of it is treated as coming from a stranger.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, TORCH, open_checkpoint
from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter
from mlx_t5.checkpoints.small_files import (
    MODULES,
    SENTENCE_SETTINGS,
    read_object,
    read_small,
    require_own,
)
from mlx_t5.errors import UserError, shown
from mlx_t5.network.pooling import ACTIVATIONS, MODES, Pooling, Step, normalized

CONFIG = "config.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
_UNLIMITED = (None, int(1e30))  # what transformers writes where a tokenizer has no limit
_MAX_MODULES = 16
_MAX_WIDTH = 2**16  # of a dense layer's output; published: 768 and 1024
# The flags of MODES in a Pooling module's configuration.
_LONG_NAMES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens",
               "weightedmean_tokens", "lasttoken")  # fmt: skip
_CLASSES = "sentence_transformers.models."


def modules(folder: Path) -> list[tuple[str, Path]]:
    """The modules that modules.json lists: their kind, such as "Pooling", and their folder.

    Raises:
        UserError: it is no such list, or names a folder outside its own.
    """
    file = folder / MODULES
    text = read_small(file)
    try:
        listed = json.loads(text)
        if type(listed) is not list or len(listed) > _MAX_MODULES:
            raise ValueError(f"it is no list, or one of more than {_MAX_MODULES}")
        kinds = [(each["type"].rpartition(".")[2], each["path"]) for each in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = shown(str(error))
        raise UserError(f"{file}: no list of modules ({cause}): fetch it again") from None
    for _, path in kinds:
        if type(path) is not str or path in (".", "..") or set(path) & set("/\\\0"):
            raise UserError(f"{file}: names {shown(path)!r}, which is no folder of its own")
        require_own(folder / path, folder)
    return [(kind, folder / path) for kind, path in kinds]


def copy_modules(source: Path, target: Path) -> None:
    """Copies the modules of a folder, if it has any, with safetensors for weights.

    Args:
        source: a folder that `read_pooling` has read without an error.
        target: a folder to write into.

    Raises:
        UserError: a file is damaged.
    """
    if not os.path.lexists(source / MODULES):
        return
    listed = []
    for i, (kind, place) in enumerate(modules(source)):
        path = f"{i}_{kind}" if place != source else ""
        listed.append({"idx": i, "name": str(i), "path": path, "type": _CLASSES + kind})
        if not path or not os.path.lexists(place / CONFIG):
            continue
        (target / path).mkdir()
        (target / path / CONFIG).write_bytes(read_small(place / CONFIG, root=source))
        if any((place / name).is_file() for name in (SAFETENSORS, TORCH)):
            _copy_weights(place, source, target / path / SAFETENSORS)
    (target / MODULES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def _copy_weights(place: Path, root: Path, path: Path) -> None:
    with open_checkpoint(place, root=root) as stored:
        for name in stored.names:
            stored.require_readable(name)
        tensors = {name: (stored.dtype(name), stored.shape(name)) for name in stored.names}
        with SafetensorsWriter(path, tensors, {"format": "pt"}) as file:
            for name, array in stored.items():
                file.append(name, array)


def read_pooling(folder: Path, d_model: int) -> Pooling:
    """How the texts of a model folder become vectors.

    Args:
        folder: with modules.json if it is one of sentence-transformers.
        d_model: width of the encoder's states.

    Raises:
        UserError: a file is damaged, or asks for what is not supported.
    """
    if not os.path.lexists(folder / MODULES):
        return Pooling()
    modes: tuple[str, ...] | None = None
    steps: list[Step] = []
    width = d_model
    for kind, place in modules(folder):
        if kind == "Transformer" and modes is None and place == folder:
            continue
        if kind == "Pooling" and modes is None:
            modes = _modes(_object(place / CONFIG, folder), place)
            width *= len(modes)
        elif kind == "Dense" and modes:
            step, width = _dense(place, folder, width)
            steps.append(step)
        elif kind == "Normalize" and modes:
            steps.append(normalized)
        else:
            where = f"{folder / MODULES} has a module {shown(kind)} in a place"
            raise UserError(f"{where} that is not supported; known: Pooling, then Dense, Normalize")
    if modes is None:
        raise UserError(f"{folder / MODULES} has no Pooling module: fetch it again")
    return Pooling(modes, tuple(steps), **_settings(folder))


def _modes(raw: dict, place: Path) -> tuple[str, ...]:
    """The modes that a Pooling module's config.json asks for, by name or by flags."""
    given = raw.get("pooling_mode")
    if given is None:
        flags = {
            mode: f"pooling_mode_{name}" for mode, name in zip(MODES, _LONG_NAMES, strict=True)
        }
        modes = [mode for mode, flag in flags.items() if raw.get(flag, False) is True]
    else:
        modes = given if isinstance(given, list) else [given]
    unknown = [mode for mode in modes if not isinstance(mode, str) or mode not in MODES]
    if unknown or not modes:
        found = shown(unknown[0]) if unknown else "none"
        raise UserError(f"{place}: pooling mode {found}; known: {', '.join(MODES)}")
    if raw.get("include_prompt", True) is not True:
        raise UserError(f"{place}: include_prompt is not true, which is not supported")
    return tuple(mode for mode in MODES if mode in modes)


def _dense(place: Path, root: Path, width: int) -> tuple[Step, int]:
    """The layer of a Dense module, and the width of what it gives."""
    raw = _object(place / CONFIG, root)
    name = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{place}: activation_function {shown(name)} is not known; known: {known}")
    outputs, bias = raw.get("out_features"), raw.get("bias", True)
    if type(outputs) is not int or not 0 < outputs <= _MAX_WIDTH or type(bias) is not bool:
        raise UserError(f"{place}: config.json has no valid out_features and bias: fetch it again")
    expected = {"linear.weight": (outputs, width)} | ({"linear.bias": (outputs,)} if bias else {})
    with open_checkpoint(place, root=root) as stored:
        found = {n: stored.shape(n) for n in stored.names}
        if found != expected:
            raise UserError(f"{place}: its tensors are not {expected}: fetch it again")
        weights = [stored.read(n).astype(mx.float32) for n in expected]
        mx.eval(weights)
    act = ACTIVATIONS[name]

    def layer(x: mx.array) -> mx.array:
        return act(sum(weights[1:], x @ weights[0].T))

    return layer, outputs


def _settings(folder: Path) -> dict[str, Any]:
    """What is done to texts before the encoder reads them, as attributes of `Pooling`."""
    reading, general = (_object(folder / name, folder) for name in SENTENCE_SETTINGS)
    longest, lower = reading.get("max_seq_length"), reading.get("do_lower_case", False)
    if longest is None:  # later versions leave it to the tokenizer
        longest = _object(folder / TOKENIZER_SETTINGS, folder).get("model_max_length")
        longest = None if longest in _UNLIMITED else longest
    name, prompts = general.get("default_prompt_name"), general.get("prompts") or {}
    try:
        prompt = prompts[name] if name else ""
        fits = isinstance(prompt, str) and type(lower) is bool
        fits = fits and (longest is None or (type(longest) is int and longest >= 1))
    except (TypeError, LookupError):
        fits = False
    if not fits:
        files = " or ".join((*SENTENCE_SETTINGS, TOKENIZER_SETTINGS))
        raise UserError(f"{folder}: {files} has an entry that makes no sense: fetch it again")
    return {"max_tokens": longest, "lower_case": lower, "prompt": prompt}


def _object(file: Path, root: Path) -> dict:
    """The object in a JSON file of the model folder `root`; {} if there is none."""
    return read_object(file, "fetch it again", root) if os.path.lexists(file) else {}
