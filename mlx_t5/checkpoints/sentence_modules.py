"""The modules of a folder of sentence-transformers: their list, what they compute, and copies.

modules.json lists a Transformer, which is the folder itself, and what turns its states into a
vector, each with a folder of its own: `1_Pooling/config.json`, `2_Dense/config.json` and its
weights, `3_Normalize`. They compute what they do in version 6; what is not supported or not known
is refused by its name. All of it is treated as coming from a stranger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, open_checkpoint
from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter
from mlx_t5.checkpoints.sentence_settings import (
    read_entry,
    read_if_there,
    read_settings,
    refused,
    require_known,
)
from mlx_t5.checkpoints.small_files import MODULES, read_small, require_own
from mlx_t5.errors import UserError, shown
from mlx_t5.pooling import (
    ACTIVATIONS,
    MODES,
    TOKENS,
    VECTOR,
    Applied,
    Module,
    Pooled,
    Pooling,
    normalized,
)
from mlx_t5.ranges import FLAG, Range, checked

CONFIG = "config.json"
_MAX_MODULES = 16
# Of a dense layer's output; published: 768 and 1024.
_WIDTH = Range(int, 1, 2**16, "a whole number from 1 to 65536")
# The flags of MODES in a Pooling module's configuration.
_FLAGS = tuple(
    f"pooling_mode_{name}"
    for name in ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens",
                 "weightedmean_tokens", "lasttoken")
)  # fmt: skip
_DIMENSION = ("embedding_dimension", "word_embedding_dimension")
_PACKAGE = "sentence_transformers."
_CLASSES = f"{_PACKAGE}models."
_TORCH = "torch.nn."
_INPUT, _OUTPUT = "module_input_name", "module_output_name"


def modules(folder: Path) -> list[tuple[str, Path]]:
    """The modules that modules.json lists: their kind, such as "Pooling", and their folder.

    The kind is the class's name, with that of its package if this is not sentence-transformers.

    Raises:
        UserError: it is no such list, or names a folder outside its own.
    """
    file = folder / MODULES
    text = read_small(file)
    try:
        listed = json.loads(text)
        if type(listed) is not list or len(listed) > _MAX_MODULES:
            raise ValueError(f"it is no list, or one of more than {_MAX_MODULES}")
        pairs = [(entry["type"], entry["path"]) for entry in listed]
        if len({str(entry.get("name", i)) for i, entry in enumerate(listed)}) < len(listed):
            raise ValueError("two modules have one name")
        kinds = [(t.rpartition(".")[2] if t.startswith(_PACKAGE) else t, p) for t, p in pairs]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = shown(str(error))
        raise UserError(f"{file}: no list of modules ({cause}): fetch it again") from None
    for entry in listed:
        require_known(file, entry, ("idx", "name", "path", "type", "kwargs"))
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
    for i, (kind, module) in enumerate(modules(source)):
        path = f"{i}_{kind}" if module != source else ""
        listed.append({"idx": i, "name": str(i), "path": path, "type": _CLASSES + kind})
        if not path or not os.path.lexists(module / CONFIG):
            continue
        (target / path).mkdir()
        (target / path / CONFIG).write_bytes(read_small(module / CONFIG, root=source))
        if kind == "Dense":
            _copy_weights(module, source, target / path / SAFETENSORS)
    (target / MODULES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def _copy_weights(module: Path, root: Path, path: Path) -> None:
    with open_checkpoint(module, root=root) as stored:
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
    listed = modules(folder)
    if not listed or listed[0] != ("Transformer", folder):
        raise UserError(f"{folder / MODULES}: the first module must be the folder's Transformer")
    build = {"Pooling": _pooled, "Dense": _dense, "Normalize": _normalize}
    widths, built = {TOKENS: d_model}, []  # of the features there are
    for kind, module in listed[1:]:
        if kind not in build:
            cause = f"module {shown(kind)} is not supported; known: {', '.join(build)}"
            raise UserError(f"{folder / MODULES}: {cause}")
        built.append(build[kind](module / CONFIG, folder, widths))
    if VECTOR not in widths:
        raise UserError(f"{folder / MODULES} has no Pooling module for its vectors: fetch it again")
    return Pooling(tuple(built), **read_settings(folder))


def _pooled(file: Path, root: Path, widths: dict[str, int]) -> Module:
    """The modes that a Pooling module's config.json asks for, by name or by flags."""
    raw = read_if_there(file, root)
    require_known(file, raw, ("pooling_mode", "include_prompt", *_DIMENSION, *_FLAGS))
    if not any(name in raw for name in _DIMENSION):
        raise UserError(f"{file} has no {_DIMENSION[0]}: fetch it again")
    if raw.get("include_prompt", True) is not True:
        raise refused(file, "include_prompt", raw["include_prompt"])
    by_flags = [mode for mode, flag in zip(MODES, _FLAGS, strict=True) if raw.get(flag)]
    given = raw.get("pooling_mode", by_flags or "mean")
    modes = given if isinstance(given, list) else [given]
    unknown = [mode for mode in modes if not isinstance(mode, str) or mode not in MODES]
    if unknown or not 1 <= len(modes) <= _MAX_MODULES:
        wrong = shown(unknown[0]) if unknown else f"a list of {len(modes)}"
        raise UserError(f"{file}: pooling mode {wrong}; known: {', '.join(MODES)}")
    widths[VECTOR] = len(modes) * widths[TOKENS]
    return Pooled(tuple(modes))


def _dense(file: Path, root: Path, widths: dict[str, int]) -> Module:
    """A Dense module: a linear layer, an activation, and a connection around both."""
    raw = read_if_there(file, root)
    sizes = ("in_features", "out_features", "bias", "use_residual")
    require_known(file, raw, (*sizes, "activation_function", _INPUT, _OUTPUT))
    feature = _feature(file, raw, widths)
    inputs = widths[feature]
    if raw.get("in_features", inputs) != inputs:
        raise UserError(f"{file}: in_features {shown(raw['in_features'])} must be {inputs}")
    outputs = checked(f"{file}: out_features", raw.get("out_features"), _WIDTH)
    bias = read_entry(file, raw, "bias", FLAG, True)
    around = read_entry(file, raw, "use_residual", FLAG)
    act = _activation(file, raw.get("activation_function", f"{_TORCH}Tanh"))
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    expected |= {"linear.bias": (outputs,)} if bias else {}
    expected |= {"residual.weight": (outputs, inputs)} if around and inputs != outputs else {}
    weights = _weights(file.parent, root, expected)

    def layer(x: mx.array) -> mx.array:
        y = act(x @ weights["linear.weight"].T + weights.get("linear.bias", 0))
        if not around:
            return y
        return y + (x @ weights["residual.weight"].T if inputs != outputs else x)

    widths[feature] = outputs
    return Applied(layer, feature)


def _normalize(file: Path, root: Path, widths: dict[str, int]) -> Module:
    raw = read_if_there(file, root)
    require_known(file, raw, (_INPUT, _OUTPUT))
    return Applied(normalized, _feature(file, raw, widths))


def _feature(file: Path, raw: Mapping[str, Any], widths: Mapping[str, int]) -> str:
    """The name of the feature that a module changes: the tokens' states, or the vector."""
    feature = VECTOR if raw.get(_INPUT) is None else raw[_INPUT]
    if not isinstance(feature, str) or feature not in widths:
        raise refused(file, _INPUT, feature)
    if raw.get(_OUTPUT) not in (None, feature):
        raise refused(file, _OUTPUT, raw[_OUTPUT])
    return feature


def _activation(file: Path, name: Any) -> Any:
    activation = str(name).removeprefix(_TORCH).rpartition(".")[2]
    if not str(name).startswith(_TORCH) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{file}: activation_function {shown(name)} is not known; known: {known}")
    return ACTIVATIONS[activation]


def _weights(
    module: Path, root: Path, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, mx.array]:
    """A module's tensors in float32, which must be these, by name and shape."""
    with open_checkpoint(module, root=root) as stored:
        if {name: stored.shape(name) for name in stored.names} != expected:
            raise UserError(f"{module}: its tensors are not {dict(expected)}: fetch it again")
        weights = {name: stored.read(name).astype(mx.float32) for name in expected}
        mx.eval(weights)
    return weights
