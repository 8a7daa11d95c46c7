"""Tiny random models of every T5 family, made by Hugging Face transformers in the test itself.

Each model is saved as its publishers saved the real ones: config.json has the entries that they
wrote, and the tensors have the names that they used. All weights are random, norms and biases too.
Their scale makes attention neither flat nor one-hot, so any wrong rule changes the logits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
SHAPE = {
    "vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "n_positions": 512, "task_specific_params": {"a": {}},
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu"}
UNTIED = {**GATED, "tie_word_embeddings": False}


@dataclass(frozen=True, eq=False)
class Family:
    """The particular properties of a family.

    Attributes:
        name: the name of the family.
        config: the entries of its config.json added to `SHAPE`.
        embeddings: the names under which the embedding is stored.
        stores_head: whether `lm_head.weight` is stored.
        stray: whether the checkpoint has a tensor that belongs to no layer.
    """

    name: str
    config: dict[str, Any]
    embeddings: tuple[str, ...] = ("shared",)
    stores_head: bool = True
    stray: bool = False

    @property
    def raw(self) -> dict[str, Any]:
        """Returns the content of config.json."""
        return {"model_type": "t5", **SHAPE, **self.config}

    @property
    def separate_head(self) -> bool:
        """Whether the head has its own weights; a tied head scales states by d_model^-0.5."""
        return not self.config.get("tie_word_embeddings", True)


ALL = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
WIDE = {"feed_forward_proj": "gated-silu", "tie_word_embeddings": True, "d_kv": 64}
DEEP = {"vocab_size": 384, "num_layers": 6, "num_decoder_layers": 2, "num_heads": 3}
FEW = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
FEW |= {"num_layers": 4, "num_decoder_layers": 1}
FAMILIES = (
    Family("t5", {"num_layers": 3}, ALL, stray=True),
    Family("flan", {**UNTIED, "d_kv": 64, "num_heads": 2}, ALL),
    Family("mt5", {**UNTIED, "model_type": "mt5", "num_heads": 6}),
    Family("umt5", {**UNTIED, "model_type": "umt5", "num_layers": 3}),
    Family("umt5-tied", {**GATED, "model_type": "umt5"}, stores_head=False),
    Family("ul2", WIDE, stores_head=False),
    Family("byt5", {**UNTIED, **DEEP}),
    Family("madlad", {**UNTIED, "pad_token_id": 1, "eos_token_id": 2, "d_model": 48}, ALL[2:]),
    Family("buckets", {"feed_forward_proj": "gelu", **FEW}, stores_head=False),
)


@dataclass
class Reference:
    """A family's model in transformers, and the folder in which it was saved."""

    family: Family
    model: Any
    folder: Path

    def encode(self, ids: list, mask: list | None = None) -> Any:
        """Returns the encoder's output (B, S, d_model) as a numpy array."""
        return _run(self.model.encoder, "last_hidden_state", input_ids=ids, attention_mask=mask)

    def logits(self, ids: list, decoder_ids: list, mask: list | None) -> Any:
        """Returns logits (B, T, V) as a numpy array."""
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids}
        return _run(self.model, "logits", **inputs)


def _run(module: Any, output: str, **inputs: list | None) -> Any:
    import torch

    tensors = {name: ids if ids is None else torch.tensor(ids) for name, ids in inputs.items()}
    with torch.no_grad():
        return module(**tensors)[output].numpy()


def make(family: Family, folder: Path) -> Reference:
    """Makes and saves a family's model."""
    model = build(family)
    save(model, family, folder)
    return Reference(family, model, folder)


def build(family: Family) -> Any:
    """Returns a random model of transformers, whose values have the size of trained ones."""
    import torch
    import transformers

    entries = {name: value for name, value in family.raw.items() if name != "n_positions"}
    config = transformers.AutoConfig.for_model(**entries)
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    if family.separate_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(generator=generator)
            if "norm" in name:
                weight.abs_().add_(0.5)
            elif "shared" not in name and "relative" not in name:
                weight.mul_(weight.shape[1] ** -0.5)
                weight.mul_(config.d_kv**-0.5 if name.endswith("q.weight") else 1)
    if config.model_type == "umt5":
        # config.json decides whether umT5 is scaled; transformers 5 asks it again since 5.24.
        model.config.tie_word_embeddings = not family.separate_head
    return model


def save(model: Any, family: Family, folder: Path) -> None:
    """Writes the folder of a model in the way of the family's publishers."""
    import torch
    from safetensors.torch import save_file

    heads = ("embed_tokens.weight", "shared.weight", "lm_head.weight")
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if not n.endswith(heads)}
    for name in family.embeddings:
        tensors[f"{name}.weight"] = model.shared.weight.detach().clone()
    if family.stores_head:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    if family.stray:
        tensors[STRAY] = torch.ones(family.raw["relative_attention_num_buckets"], 4)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.raw))
