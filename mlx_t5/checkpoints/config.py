"""The shape of a T5 model, read from a Hugging Face `config.json` as its publisher saved it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_t5.checkpoints.generation_config import FILE, TOKEN_IDS
from mlx_t5.disk import read_object
from mlx_t5.errors import UserError, brief
from mlx_t5.installation import command
from mlx_t5.settings import FLAG, Range, checked, refusal

MODEL_TYPES = ("t5", "mt5", "umt5")
# Their model_type is t5, but they read patches of a series instead of tokens.
OTHER_FORECASTERS = {"ChronosBoltModelForForecasting": "Chronos-Bolt", "Chronos2Model": "Chronos-2"}
ACTIVATION_NAMES = (
    "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish",
    "relu6", "tanh",
)  # fmt: skip
_MAX_END_TOKENS = 256  # ids in eos_token_id
# No published model comes near; a larger number means that the file is broken or hostile.
_MAX_SIZE = 2**24
_MAX_LAYERS = 256  # layers of a stack
_RANGES = {  # of the fields, by their type
    "int": Range(int, 1, _MAX_SIZE, f"a whole number from 1 to {_MAX_SIZE}"),
    "float": Range(float, 0, math.nextafter(1, 0), "a number from 0 to below 1"),
    "bool": FLAG,
}
_OF_IDS = f"{FILE} or config.json"
_TOKEN_ID = Range(int, 0, _MAX_SIZE, f"a token id up to {_MAX_SIZE}")

_DERIVED: Any = None  # default of fields that `__post_init__` derives from other fields


@dataclass(frozen=True)
class T5Config:
    """The entries of a model's config.json; fields without a default are required."""

    vocab_size: int
    d_model: int
    d_kv: int  # of one head; num_heads * d_kv need not be d_model
    d_ff: int
    num_layers: int
    num_heads: int
    model_type: str = "t5"
    num_decoder_layers: int = _DERIVED  # equal to `num_layers`
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    dropout_rate: float = 0.1  # in training
    feed_forward_proj: str = _DERIVED  # "relu" for T5, "gated-gelu" for mT5 and umT5
    dense_act_fn: str = _DERIVED  # the last part of feed_forward_proj, but "gelu_new" if gated-gelu
    is_gated_act: bool = _DERIVED  # from feed_forward_proj
    tie_word_embeddings: bool = True  # only for scales_logits: the tensors say if there is a head
    # Written by transformers 5, where tie_word_embeddings is always true: then it decides instead.
    scale_decoder_outputs: bool | None = None
    pad_token_id: int = 0
    eos_token_id: int = 1  # the first one, if there is a list
    decoder_start_token_id: int = _DERIVED  # the padding token
    more_eos_token_ids: tuple[int, ...] = ()  # the rest of that list; a text ends at any of them
    n_positions: int | None = None  # source tokens in training; relative positions have no limit
    draft_vocab_size: int | None = None  # see draft_vocabulary.py
    tasks: tuple[tuple[str, str], ...] = ()  # names and prefixes, from task_specific_params
    translation_prefix: str = ""  # a template, see text/languages.py

    def __post_init__(self):
        projection = self.feed_forward_proj
        if projection is None:
            projection = "relu" if self.model_type == "t5" else "gated-gelu"
        activation = projection.removeprefix("gated-")
        defaults = {
            "num_decoder_layers": self.num_layers,
            "feed_forward_proj": projection,
            "dense_act_fn": "gelu_new" if projection == "gated-gelu" else activation,
            "is_gated_act": projection.startswith("gated-"),
            "decoder_start_token_id": self.pad_token_id,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, raw: dict) -> T5Config:
        """Reads a parsed config.json; ignores unknown entries and nulls.

        Raises:
            UserError: it is not a T5's, or an entry is missing, of the wrong type or out of range.
        """
        if raw.get("model_type") not in MODEL_TYPES:
            kind = reprlib.repr(raw.get("model_type"))
            raise UserError(f"config.json: model_type is {kind}, not {', '.join(MODEL_TYPES)}")
        names = raw.get("architectures")
        for name in names if isinstance(names, list) else []:
            if isinstance(name, str) and name in OTHER_FORECASTERS:
                other = f"this model is {OTHER_FORECASTERS[name]}, of another architecture than T5"
                raise UserError(f"{other}; only Chronos-T5 (amazon/chronos-t5-small) is supported")
        values: dict[str, Any] = {}
        ends = raw.get("eos_token_id")
        if isinstance(ends, list):
            if not 0 < len(ends) <= _MAX_END_TOKENS:
                raise refusal("eos_token_id", ends, f"1 to {_MAX_END_TOKENS} tokens")
            ends = [checked(f"{_OF_IDS}: eos_token_id", end, _TOKEN_ID) for end in ends]
            first, *more = dict.fromkeys(ends)
            raw, values["more_eos_token_ids"] = {**raw, "eos_token_id": first}, tuple(more)
        for field in fields(cls):
            name, kind = field.name, str(field.type).removesuffix(" | None")
            value = raw.get(name)
            if field.default == ():
                continue  # read from other entries
            if value is None:
                if field.default is MISSING:
                    raise UserError(f"config.json has no {name}; is this a T5 model?")
            elif name.endswith("_token_id"):
                values[name] = checked(f"{_OF_IDS}: {name}", value, _TOKEN_ID)
            elif kind != "str":
                values[name] = checked(f"config.json: {name}", value, _RANGES[kind])
            elif isinstance(value, str):
                values[name] = value
            else:
                raise refusal(f"config.json: {name}", value, "a text")
        tasks = raw.get("task_specific_params")
        for name, task in tasks.items() if isinstance(tasks, dict) else ():
            prefix = task.get("prefix") if isinstance(task, dict) else None
            if isinstance(prefix, str) and prefix.strip():
                values["tasks"] = (*values.get("tasks", ()), (name, prefix))
        config = cls(**values)
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.dense_act_fn not in ACTIVATION_NAMES:
            raise refusal("config.json: activation", self.dense_act_fn, ", ".join(ACTIVATION_NAMES))
        exact = self.relative_attention_num_buckets // 2
        distance = self.relative_attention_max_distance
        fits = {
            "num_layers": self.num_layers <= _MAX_LAYERS,
            "num_decoder_layers": self.num_decoder_layers <= _MAX_LAYERS,
            "num_heads times d_kv": self.num_heads * self.d_kv <= _MAX_SIZE,
            "relative_attention_num_buckets": exact >= 2,
            "relative_attention_max_distance": exact < distance <= 2**20,
            "draft_vocab_size": (self.draft_vocab_size or 0) <= self.vocab_size,
            "pad_token_id": self.pad_token_id < self.vocab_size,
            "eos_token_id": max(self.eos_token_ids) < self.vocab_size,
            "decoder_start_token_id": self.decoder_start_token_id < self.vocab_size,
        }
        for name, fit in fits.items():
            if not fit:
                raise UserError(f"{_OF_IDS}: {name} is out of range")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of all tokens that end a text; the first is `eos_token_id`."""
        return (self.eos_token_id, *self.more_eos_token_ids)

    @property
    def size(self) -> str:
        """The model's shape in words."""
        layers = f"{self.num_layers} + {self.num_decoder_layers} layers"
        return f"{self.model_type} of {layers}, d_model {self.d_model}"

    @property
    def task_prefixes(self) -> list[str]:
        """The prefixes of the model's tasks; a document may begin with one."""
        return [prefix for _, prefix in self.tasks]

    @property
    def bias_per_layer(self) -> bool:
        """Whether every layer has its own relative bias; otherwise all layers share one."""
        return self.model_type == "umt5"

    @cached_property
    def scales_logits(self) -> bool:
        """Whether hidden states are multiplied by d_model^-0.5 before the output head."""
        if self.model_type == "mt5":  # its published configs contradict each other
            return False
        if self.scale_decoder_outputs is not None:
            return self.scale_decoder_outputs
        return self.tie_word_embeddings


def read_config(folder: Path) -> dict:
    """Reads config.json; its token ids are those of generation_config.json, if it has any."""
    raw = read_object(folder / "config.json", "give a model folder, MLX or Hugging Face")
    entry = raw.get("quantization_config")
    if isinstance(entry, Mapping) and (method := entry.get("quant_method")):
        cause = f"{folder} is quantized by {brief(method)}, which cannot be read here"
        raise UserError(f"{cause}; give the original to {command('convert')} -q")
    ids = read_object(folder / FILE, default={})
    # As in transformers: without a start token, a text starts with `bos_token_id`.
    names = ("decoder_start_token_id", "bos_token_id")
    starts = [file[name] for file in (ids, raw) for name in names if file.get(name) is not None]
    raw |= {name: ids[name] for name in TOKEN_IDS if ids.get(name) not in (None, [])}
    if starts:
        start = starts[0]
        raw[names[0]] = start[0] if isinstance(start, list) and len(start) == 1 else start
    return raw
