"""Drafts that use the encoder, the embedding and the output head of their target.

Such a draft is a decoder of few layers, whose shared modules belong to the target: they are not
parameters of the draft and are not saved with it. A prompt is encoded once for both models.

A draft guesses well only with the model whose encoder it was trained on, in any type or
quantization, so its folder records that model's name. With another one of the same shape it guesses
badly, but does no harm, because every proposal is verified.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.checkpoint import fill
from mlx_t5.checkpoints.config import T5Config
from mlx_t5.checkpoints.hub import ADAPTED, source_of
from mlx_t5.errors import UserError, brief, log
from mlx_t5.network.linear import QUANTIZATION

if TYPE_CHECKING:
    from mlx_t5.model import T5

SHARED = ("shared", "encoder", "lm_head")  # modules of a T5 that a draft can use
OF_DRAFT = ("num_decoder_layers", "draft_vocab_size")  # fields that are the draft's own
OF_TARGET = (  # fields of the shape that both must have
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "is_gated_act",
    "relative_attention_num_buckets", "bias_per_layer",
)  # fmt: skip


def share(draft: nn.Module, target: T5) -> None:
    """Gives a draft its target's embedding, encoder and head, but not as parameters of its own."""
    vars(draft)["shares_with"] = target
    for name in SHARED:
        if (module := getattr(target, name, None)) is not None:
            vars(draft)[name] = module


def shared_draft(target: T5, num_decoder_layers: int, dtype: mx.Dtype = mx.float32) -> Any:
    """Returns a draft with copies of some of the target's decoder layers, not quantized.

    They are the first and others at about equal distances (2 of 24: layers 0 and 12). The final
    norm and the relative bias are copied too.

    Raises:
        UserError: `num_decoder_layers` is less than 1, or more than the target has.
    """
    depth = target.config.num_decoder_layers
    if not 1 <= num_decoder_layers <= depth:
        cause = f"a draft cannot have {num_decoder_layers} decoder layers"
        raise UserError(f"{cause}: the target has {depth}; choose 1 to {depth}")
    config = replace(target.config, num_decoder_layers=num_decoder_layers)
    draft = type(target)(config, shares_with=target)
    layers = [i * depth // num_decoder_layers for i in range(num_decoder_layers)]
    decoder, weights = target.decoder, {"norm.weight": target.decoder.norm.weight}
    for i, layer in enumerate(layers):
        weights |= plain_weights(decoder.layers[layer], f"layers.{i}.")
    for i in range(len(draft.decoder.relative_attention_bias)):
        table = decoder.relative_attention_bias[layers[i]]
        weights |= plain_weights(table, f"relative_attention_bias.{i}.")
    fill(draft.decoder, iter(weights.items()), dtype)
    return draft


def plain_weights(module: nn.Module, prefix: str = "") -> dict[str, mx.array]:
    """A module's parameters by prefixed name; quantized ones are dequantized to float32."""
    weights = {}
    for path, layer in module.named_modules():
        start = f"{prefix}{path}." if path else prefix
        arrays = {name: array for name, array in layer.items() if isinstance(array, mx.array)}
        if "scales" in arrays:
            common = [arrays[name] for name in ("scales", "biases") if name in arrays]
            if mx.issubdtype(common[0].dtype, mx.floating):  # other modes have scales of 8 bits
                common = [array.astype(mx.float32) for array in common]
            how = {name: getattr(layer, name) for name in QUANTIZATION}
            weight = mx.dequantize(layer["weight"], *common, **how)
            weights[f"{start}weight"] = weight.astype(mx.float32)
        else:
            weights |= {f"{start}{name}": array for name, array in arrays.items()}
    return weights


def target_name(folder: Path) -> str:
    """The name that drafts record of a target: its Hub id, or else its folder's name."""
    return (source_of(folder) or folder.resolve().name).partition(ADAPTED)[0]


def target_of(folder: Path, entry: Any, config: T5Config, target: T5 | None) -> T5:
    """Checks that a draft can use the encoder of `target`, and returns `target`."""
    name = entry.get("model") if isinstance(entry, dict) else None
    made_for = f"{folder} is a draft for {brief(name or 'a target without a name')}"
    if target is None:
        cure = "give it as --draft-model, or load(folder, shared_with=target)"
        raise UserError(f"{made_for} and uses its encoder: {cure}")
    if any(getattr(config, field) != getattr(target.config, field) for field in OF_TARGET):
        cure = "give it with its own target, or make a draft for this one"
        raise UserError(f"{made_for}, and the target has another shape; {cure}")
    if name != (actual := target_name(target.folder)):
        log(f"{made_for}, and the target is {actual}: the text stays right, but may take longer")
    return target


def whole(draft: T5) -> Any:
    """A standalone float32 copy of a draft, with copies of the modules that it shared."""
    target = draft.shares_with
    assert target is not None, "it shares"
    names = [name for name in SHARED if getattr(target, name, None) is not None]
    standalone = type(draft)(draft.config, separate_head="lm_head" in names)
    weights = plain_weights(draft.decoder, "decoder.")
    for name in names:
        weights |= plain_weights(getattr(target, name), f"{name}.")
    fill(standalone, iter(weights.items()), mx.float32)
    return standalone
