"""Reads and copies the modules and settings of a model folder of sentence-transformers.

modules.json lists a Transformer, which is the folder itself, and the modules that turn the
Transformer's states into a vector: `1_Pooling/config.json`, `2_Dense/config.json` with weights, and
`3_Normalize`. The modules, the settings in the files `SENTENCE_SETTINGS` and the maximum length in
tokenizer_config.json have the same effect as in `SentenceTransformer.encode` of version 6. An error
names any unsupported or unknown entry. All files are untrusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, open_checkpoint
from mlx_t5.checkpoints.pooling import Pooling, Step, normalized
from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter
from mlx_t5.checkpoints.small_files import (
    MODULES,
    SENTENCE_SETTINGS,
    read_object,
    read_small,
    require_own,
)
from mlx_t5.errors import UserError, shown
from mlx_t5.ranges import POSITIVE, Range, checked

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
READING, GENERAL = SENTENCE_SETTINGS
_MAX_MODULES = 16
# The allowed kinds of the first, the second and every later module.
_KINDS = ("Transformer",), ("Pooling",), ("Dense", "Normalize")
_PACKAGE = "sentence_transformers."
_CLASSES = f"{_PACKAGE}models."
_TORCH = "torch.nn."
# Limit on the width of a dense layer's output; published models have 768 and 1024.
_WIDTH = Range(int, 1, 2**16, "a whole number from 1 to 65536")
_UNLIMITED = 1e20  # transformers treats larger numbers as no limit, and writes 1e30
_NOTHING: tuple[Any, ...] = (None, False, {}, [])  # values with which an entry has no effect
_ACTIVATIONS: Mapping[str, Step] = MappingProxyType(
    {"Identity": lambda x: x, "Tanh": mx.tanh, "ReLU": nn.relu, "GELU": nn.gelu}
)
# Flags that older versions of sentence-transformers write instead of `pooling_mode`.
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "lasttoken",
    }
)
# Entries that are read, and entries that do not change a vector.
_KNOWN = frozenset(
    "max_seq_length unpad_inputs prompts default_prompt_name __version__ requirements "
    "similarity_fn_name in_features out_features bias activation_function embedding_dimension "
    "word_embedding_dimension pooling_mode".split()
) | frozenset(_FLAGS)
# The supported values of other entries: first in settings, then in the config.json of modules.
_OF_SETTINGS: Mapping[str, tuple] = MappingProxyType(
    {
        "model_type": ("SentenceTransformer",),
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
        "modality_config": tuple(
            {"text": {"method": "forward", "method_output_name": output}}
            for output in ("last_hidden_state", ["last_hidden_state"])
        ),
    }
)
_OF_MODULES: Mapping[str, tuple] = MappingProxyType(
    {
        "include_prompt": (True,),
        "module_input_name": ("sentence_embedding",),
        "module_output_name": ("sentence_embedding",),
    }
)


def modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the folder of each module in modules.json.

    The kind is the name of the module's class, such as "Pooling". For a class that is not from
    sentence-transformers, the kind is the full name, with the package.

    Raises:
        UserError: the file holds no list of modules, or names a folder outside the model folder.
    """
    file = folder / MODULES
    text = read_small(file)
    try:
        listed = json.loads(text)
        if type(listed) is not list or len(listed) > _MAX_MODULES:
            raise ValueError(f"it is no list, or one of more than {_MAX_MODULES}")
        pairs = [(entry["type"], entry["path"]) for entry in listed]
        kinds = [(t.rpartition(".")[2] if t.startswith(_PACKAGE) else t, p) for t, p in pairs]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = shown(str(error))
        raise UserError(f"{file}: no list of modules ({cause}): fetch it again") from None
    for _, path in kinds:
        if type(path) is not str or path in (".", "..") or set(path) & set("/\\\0"):
            raise UserError(f"{file}: names {shown(path)!r}, which is no folder of its own")
        require_own(folder / path, folder)
    return [(kind, folder / path) for kind, path in kinds]


def copy_modules(source: Path, target: Path) -> None:
    """Copies the modules of a model folder, if any; writes their weights as safetensors.

    Args:
        source: a model folder that `read_pooling` has read without an error.
        target: the folder to write into.

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
        if kind != "Dense":
            continue
        with open_checkpoint(module, root=source) as stored:
            tensors = {name: (stored.dtype(name), stored.shape(name)) for name in stored.names}
            with SafetensorsWriter(target / path / SAFETENSORS, tensors, {"format": "pt"}) as file:
                for name, array in stored.items():
                    file.append(name, array)
    (target / MODULES).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def read_pooling(folder: Path, d_model: int) -> Pooling:
    """Returns the pooling of a model folder.

    Args:
        folder: the model folder. Without a modules.json, the pooling is the mean.
        d_model: the width of the encoder's states.

    Raises:
        UserError: a file is damaged, or has an unsupported entry.
    """
    if not os.path.lexists(folder / MODULES):
        return Pooling()
    listed = modules(folder)
    for i, (kind, path) in enumerate(listed):
        if kind not in _KINDS[min(i, 2)] or (path == folder) != (i == 0):
            raise _refused(folder / MODULES, f"module {i}", kind)
    if len(listed) < 2:
        raise UserError(f"{folder / MODULES} has no Pooling module for its vectors: fetch it again")
    steps, width = [], d_model
    for kind, path in listed[2:]:
        if kind == "Dense":
            step, width = _dense(path, folder, width)
        else:
            _entries(path / CONFIG, folder, _OF_MODULES)
            step = normalized
        steps.append(step)
    mode, prompt = _mode(listed[1][1] / CONFIG, folder), _prompt(folder)
    return Pooling(mode, tuple(steps), _max_tokens(folder), prompt)


def _entries(file: Path, root: Path, supported: Mapping[str, tuple]) -> dict[str, Any]:
    """Returns the entries of a JSON file in the model folder `root`; {} if there is no file.

    Raises:
        UserError: an entry has an unsupported value. An entry in `_KNOWN` may have any value. An
            entry in `supported` may have the values listed there. Any other entry may have only a
            value in `_NOTHING`, with which it has no effect.
    """
    raw = read_object(file, "fetch it again", root) if os.path.lexists(file) else {}
    for name, value in raw.items():
        if name not in _KNOWN and value is not None and value not in supported.get(name, _NOTHING):
            raise _refused(file, name, value)
    return raw


def _refused(file: Path, name: str, value: Any) -> UserError:
    what = f"{file}: {shown(name)} {shown(value)}"
    return UserError(f"{what} is not supported here; use sentence-transformers")


def _mode(file: Path, root: Path) -> str:
    """Returns the mode of a Pooling module, such as "mean", which is the default.

    Older files have a flag for each mode instead of the entry `pooling_mode`.
    """
    raw = _entries(file, root, _OF_MODULES)
    if not raw:
        raise UserError(f"{file} has no pooling mode: fetch it again")
    flags = [mode for flag, mode in _FLAGS.items() if raw.get(flag)]
    mode = raw.get("pooling_mode", flags or "mean")
    modes = mode if isinstance(mode, list) else [mode]
    if modes not in ([mode] for mode in _FLAGS.values()):
        raise _refused(file, "pooling_mode", mode)
    return modes[0]


def _dense(module: Path, root: Path, inputs: int) -> tuple[Step, int]:
    """Returns a Dense module's function (linear layer, then activation) and its output width."""
    file = module / CONFIG
    raw = _entries(file, root, _OF_MODULES)
    outputs = checked(f"{file}: out_features", raw.get("out_features"), _WIDTH)
    name = str(raw.get("activation_function", f"{_TORCH}Tanh"))
    act = _ACTIVATIONS.get(name.rpartition(".")[2]) if name.startswith(_TORCH) else None
    if act is None:
        raise _refused(file, "activation_function", name)
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    expected |= {"linear.bias": (outputs,)} if raw.get("bias") is not False else {}
    with open_checkpoint(module, root=root) as stored:
        if {name: stored.shape(name) for name in stored.names} != expected:
            raise UserError(f"{module}: its tensors are not {expected}: fetch it again")
        weights = {name: stored.read(name).astype(mx.float32) for name in expected}
        mx.eval(weights)
    weight, bias = weights["linear.weight"], weights.get("linear.bias", 0)
    return lambda x: act(x @ weight.T + bias), outputs


def _prompt(folder: Path) -> str:
    """Returns the prompt that is the prefix of every text; "" if there is none."""
    file = folder / GENERAL
    raw = _entries(file, folder, _OF_SETTINGS)
    name, prompts = raw.get("default_prompt_name"), raw.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise UserError(f"{file}: its prompts have no text for default_prompt_name {shown(name)}")
    return prompt


def _max_tokens(folder: Path) -> int | None:
    """Returns the maximum number of tokens, with the end token, in a text; None for no limit."""
    reading, file = _entries(folder / READING, folder, _OF_SETTINGS), folder / TOKENIZER
    own = read_object(file, "fetch it again", folder) if os.path.lexists(file) else {}
    if own.get("truncation_side") not in (None, "right"):
        raise _refused(file, "truncation_side", own["truncation_side"])
    name, limit = "max_seq_length", reading.get("max_seq_length")
    if limit is None:
        name, limit = "model_max_length", own.get("model_max_length")
    if limit is None or (isinstance(limit, (int, float)) and limit > _UNLIMITED):
        return None
    return checked(f"{folder}: {name}", limit, POSITIVE)
