"""Pools the encoder's states to one vector per text, as a model's folder says.

A folder of sentence-transformers lists its modules in modules.json. The ones that published T5
encoders have are read: Transformer (the folder itself), mean Pooling, then Dense and Normalize, if
they are there. For any other T5, a text's vector is the mean of its tokens' states.

Shapes: states (texts, tokens, d_model), mask (texts, tokens), vectors (texts, width); float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_t5.backend import mx
from mlx_t5.checkpoints.reading import as_array, read_weights
from mlx_t5.disk import MODULE_FOLDER, MODULES, SENTENCE_SETTINGS, read_object
from mlx_t5.errors import UserError, brief


@dataclass(frozen=True)
class Pooling:
    """Turns the encoder's states into one vector per text.

    Attributes:
        weight: the dense layer's weight (width, d_model); None without a dense layer.
        bias: the dense layer's bias (width,) or 0.
        has_tanh: whether the dense layer's activation is tanh.
        normalize: whether vectors are scaled to length 1.
        max_tokens: number of tokens to which a text is cut, including the end token, or None.
        prompt: the prefix of every text.
    """

    weight: mx.array | None = None
    bias: mx.array | float = 0.0
    has_tanh: bool = False
    normalize: bool = False
    max_tokens: int | None = None
    prompt: str = ""

    def __call__(self, states: mx.array, mask: mx.array | None) -> mx.array:
        weights = mx.ones(states.shape[:2]) if mask is None else mask.astype(mx.float32)
        vectors = (states.astype(mx.float32) * weights[..., None]).sum(axis=1)
        vectors /= weights.sum(axis=1)[:, None]
        if self.weight is not None:
            vectors = vectors @ self.weight.T + self.bias
            vectors = mx.tanh(vectors) if self.has_tanh else vectors
        return normalized(vectors) if self.normalize else vectors

    def width(self, d_model: int) -> int:
        return d_model if self.weight is None else len(self.weight)

    def cut(self, ids: list[int]) -> list[int]:
        most = self.max_tokens or len(ids)
        return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def normalized(vectors: mx.array) -> mx.array:
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def read_pooling(folder: Path, d_model: int) -> Pooling:
    """Reads the pooling of a folder of sentence-transformers."""
    try:
        listed = json.loads((folder / MODULES).read_bytes())
        kinds = [entry["type"].rpartition(".")[2] for entry in listed]
        paths = [entry["path"] for entry in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / MODULES} is damaged ({error!r}): fetch it again") from None
    own = all(MODULE_FOLDER.fullmatch(str(path)) for path in paths[1:])
    optional = [kind for kind in ("Dense", "Normalize") if kind in kinds]
    if kinds != ["Transformer", "Pooling", *optional] or paths[0] != "" or not own:
        raise _refused(folder / MODULES, "modules", " ".join(map(str, kinds)))
    pooling, reading, general, tokenizer = (
        read_object(folder / name, default={})
        for name in (f"{paths[1]}/config.json", *SENTENCE_SETTINGS, "tokenizer_config.json")
    )
    # Before version 6 there is a flag for each mode instead of `pooling_mode`.
    flags = [name for name in pooling if name.startswith("pooling_mode_") and pooling[name] is True]
    mode = pooling.get("pooling_mode", flags or "mean")
    if mode not in ("mean", ["mean"], ["pooling_mode_mean_tokens"]):
        raise _refused(folder, "pooling_mode", mode)
    plain = {"include_prompt": True, "do_lower_case": False, "truncate_dim": None}
    for name, value in {**plain, **pooling, **reading, **general}.items():
        if name in plain and value not in (plain[name], None):
            raise _refused(folder, name, value)
    limit = reading.get("max_seq_length") or tokenizer.get("model_max_length")
    # transformers writes 1e30 for no limit.
    max_tokens = limit if type(limit) is int and 0 < limit < 1e20 else None
    default = general.get("default_prompt_name")
    prompt = "" if default is None else (general.get("prompts") or {}).get(default)
    if not isinstance(prompt, str):
        raise _refused(folder, "default_prompt_name", default)
    dense = _dense(folder / paths[2], d_model) if "Dense" in kinds else Pooling()
    return replace(dense, normalize="Normalize" in kinds, max_tokens=max_tokens, prompt=prompt)


def _dense(module: Path, d_model: int) -> Pooling:
    raw = read_object(module / "config.json")
    activation = str(raw.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise _refused(module, "activation_function", activation)
    weights = {name: as_array(t).astype(mx.float32) for name, t in read_weights(module)[0].items()}
    weight, bias = weights.pop("linear.weight", mx.zeros(1)), weights.pop("linear.bias", 0.0)
    if weights or weight.shape[1:] != (d_model,):
        raise UserError(f"{module} does not fit the encoder: fetch it again")
    return Pooling(weight, bias, activation == "Tanh")


def _refused(where: Path, name: str, value: object) -> UserError:
    what = f"{where}: {name} {brief(value)}"
    return UserError(f"{what} is not supported here; use sentence-transformers")
