"""Tiny random models of every T5 family, made by Hugging Face transformers in the test itself.

Each is saved as its publishers saved the real ones: config.json with the entries they wrote, and
the tensors under the names they used. All weights are random, norms and biases too, and scaled
so that attention is neither flat nor one-hot: a rule that is off anywhere changes the logits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

ALL_EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}  # beginnings of the classes' names
SHAPE = {
    "vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "n_positions": 512, "task_specific_params": {"a": {}},
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports `torch` or `transformers` on first use, because importing takes seconds."""
    if name not in ("torch", "transformers"):
        raise AttributeError(name)
    return pytest.importorskip(name, reason=f"requirements/dev.txt installs {name}")


@dataclass(frozen=True)
class Family:
    """The particular properties of a family.

    Attributes:
        name: the name of the family.
        config: the entries of its config.json added to `SHAPE`; None removes an entry.
        separate_head: whether `lm_head` is not the embedding.
        scaled: whether hidden states are multiplied by d_model^-0.5 before the head.
        embeddings: the names under which the embedding is stored.
        stores_head: whether `lm_head.weight` is stored.
        stray: whether the checkpoint has a tensor that belongs to no layer.
    """

    name: str
    config: dict[str, Any]
    separate_head: bool
    scaled: bool
    embeddings: tuple[str, ...] = ("shared",)
    stores_head: bool = True
    stray: bool = False

    @property
    def raw(self) -> dict[str, Any]:
        """Returns the content of config.json."""
        raw = {"model_type": "t5", **SHAPE, **self.config}
        return {name: value for name, value in raw.items() if value is not None}


GATED = {"feed_forward_proj": "gated-gelu"}
UNTIED = {**GATED, "tie_word_embeddings": False}
FAMILIES = (
    Family("t5", {"num_layers": 3}, False, True, ALL_EMBEDDINGS, stray=True),
    Family("flan", {**UNTIED, "d_kv": 64, "num_heads": 2}, True, False, ALL_EMBEDDINGS),
    Family("mt5", {**UNTIED, "model_type": "mt5", "num_heads": 6}, True, False),
    Family("umt5", {**UNTIED, "model_type": "umt5", "num_layers": 3}, True, False),
    Family("umt5-tied", {**GATED, "model_type": "umt5"}, False, True, stores_head=False),
    Family(
        "ul2",
        {"feed_forward_proj": "gated-silu", "tie_word_embeddings": True, "d_kv": 64},
        False, True, stores_head=False,
    ),
    Family(
        "byt5",
        {**UNTIED, "vocab_size": 384, "num_layers": 6, "num_decoder_layers": 2, "num_heads": 3},
        True, False,
    ),
    Family(
        "madlad",
        {**UNTIED, "pad_token_id": 1, "eos_token_id": 2, "d_model": 48},
        True, False, ("decoder.embed_tokens",),
    ),
    Family(
        "buckets",
        {"feed_forward_proj": "gelu", "relative_attention_num_buckets": 12,
         "relative_attention_max_distance": 20, "num_layers": 4, "num_decoder_layers": 1},
        False, True, stores_head=False,
    ),
)  # fmt: skip


@dataclass
class Reference:
    """A family's model in transformers, and the folder in which it was saved."""

    family: Family
    model: torch.nn.Module
    folder: Path

    def encode(self, ids: list[list[int]], mask: list[list[int]] | None = None) -> Any:
        """Returns the encoder's output (B, S, d_model) as a numpy array."""
        import torch

        mask = None if mask is None else torch.tensor(mask)
        with torch.no_grad():
            out = self.model.encoder(input_ids=torch.tensor(ids), attention_mask=mask)
        return out.last_hidden_state.numpy()

    def logits(
        self, ids: list[list[int]], decoder_ids: list[list[int]], mask: list[list[int]] | None
    ) -> Any:
        """Returns logits (B, T, V) as a numpy array."""
        import torch

        mask = None if mask is None else torch.tensor(mask)
        with torch.no_grad():
            out = self.model(
                input_ids=torch.tensor(ids), attention_mask=mask,
                decoder_input_ids=torch.tensor(decoder_ids),
            )  # fmt: skip
        return out.logits.numpy()


@dataclass
class Maker:
    """Makes and saves each family's model once."""

    root: Path
    made: dict[str, Reference] = field(default_factory=dict)

    def __call__(self, family: Family | str) -> Reference:
        if isinstance(family, str):
            family = next(f for f in FAMILIES if f.name == family)
        if family.name not in self.made:
            model, folder = build(family), self.root / family.name
            save(model, family, folder)
            self.made[family.name] = Reference(family, model, folder)
        return self.made[family.name]


def classes(model_type: str) -> tuple[Any, Any]:
    """Returns transformers' classes of the configuration and the model of a model type."""
    from families import transformers

    names = f"{CLASSES[model_type]}Config", f"{CLASSES[model_type]}ForConditionalGeneration"
    return getattr(transformers, names[0]), getattr(transformers, names[1])


def build(family: Family, seed: int = 0) -> torch.nn.Module:
    """Returns a random model of transformers with the family's rules for scale and head."""
    from families import torch

    config_class, model_class = classes(family.raw["model_type"])
    entries = {k: v for k, v in family.raw.items() if k not in ("model_type", "n_positions")}
    config = config_class(**entries)
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).eval()
    if family.separate_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _randomise(name, weight, config.d_kv, generator)
    if family.raw["model_type"] == "umt5":
        # transformers 4 and the training code scale umT5 by config.json; version 5 always scales.
        model.config.tie_word_embeddings = family.scaled
    return model


def _randomise(name: str, weight: torch.Tensor, d_kv: int, generator: torch.Generator) -> None:
    """Fills a parameter with values of the size of trained ones."""
    weight.normal_(generator=generator)
    if "norm" in name:
        weight.abs_().add_(0.5)
    elif "shared" not in name and "relative" not in name:
        weight.mul_(weight.shape[1] ** -0.5)
        if name.endswith("q.weight"):
            weight.mul_(d_kv**-0.5)


def save(model: torch.nn.Module, family: Family, folder: Path) -> None:
    """Writes the folder as the family's publishers did."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "embed_tokens" not in name and name not in ("shared.weight", "lm_head.weight")
    }
    for name in family.embeddings:
        tensors[f"{name}.weight"] = model.shared.weight.detach().clone()
    if family.stores_head:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    if family.stray:
        tensors[STRAY] = torch.ones(family.raw["relative_attention_num_buckets"], 4)
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(family.raw, indent=2))
