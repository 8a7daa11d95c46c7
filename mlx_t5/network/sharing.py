"""Drafts that use the encoder, the embedding and the output head of their target.

Such a draft is a decoder of few layers. A prompt is encoded once for both models, and the draft
computes only its cross-attention. The shared modules are held once. They belong to the target:
they are not parameters of the draft and are not saved with it.

A draft fits only the model whose encoder it was trained on, in any type or quantization. So its
folder keeps the target's fingerprint (fingerprint.py). If a LoRA adapter was merged into the
target, only a part of the fingerprint is compared. With the wrong target a draft would guess badly
but do no harm, as every proposal is verified; the fingerprint reports the mistake at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, nn
from mlx_t5.errors import UserError, shown
from mlx_t5.network.fingerprint import WEIGHTS, fingerprint, same_model
from mlx_t5.network.weights import fill

if TYPE_CHECKING:
    from model import T5

SHARED = ("shared", "encoder", "lm_head")  # modules of a T5 that a draft can use
ENTRY = "shares_encoder_with"  # in a draft's config.json: the fingerprint, and the target's name
OF_DRAFT = ("num_decoder_layers", "draft_vocab_size")  # fields that are the draft's own


def share(draft: nn.Module, target: T5) -> None:
    """Gives a draft its target's embedding, encoder and head, but not as the draft's parameters."""
    vars(draft)["shares_with"] = target
    for name in SHARED:
        if (module := getattr(target, name, None)) is not None:
            vars(draft)[name] = module


def shared_draft(target: T5, num_decoder_layers: int, dtype: mx.Dtype = mx.float32) -> Any:
    """Returns a draft made of copies of some of the target's decoder layers.

    Args:
        target: a `model.T5`; may be quantized.
        num_decoder_layers: number of layers to copy: the first layer, and others at about equal
            distances (2 of 24: layers 0 and 12). The final norm and the relative bias are copied
            too. Copies are not quantized.
        dtype: type of the draft's parameters; see also `layers.keep_float32`.

    Returns:
        A T5 whose own parameters are only its decoder's; `shares_with` is the target.

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
    """Returns a module's parameters by prefixed name; quantized ones are dequantized to float32."""
    weights = {}
    for path, layer in module.named_modules():
        start = f"{prefix}{path}." if path else prefix
        arrays = {name: array for name, array in layer.items() if isinstance(array, mx.array)}
        if "scales" in arrays:
            weights[f"{start}weight"] = _dequantized(layer)
        else:
            weights |= {f"{start}{name}": array for name, array in arrays.items()}
    return weights


def _dequantized(layer: Any) -> mx.array:
    """Returns the weight of a quantized layer in float32."""
    common = [layer["scales"], *([layer["biases"]] if "biases" in layer else [])]
    if mx.issubdtype(common[0].dtype, mx.floating):  # other modes have scales of 8 bits
        common = [array.astype(mx.float32) for array in common]
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer["weight"], *common, **how).astype(mx.float32)


def target_of(folder: Path, entry: Any, target: T5 | None, adapter: Any) -> T5:
    """Checks that a draft was made for `target`, and returns `target`.

    Args:
        folder: the draft's folder, for messages.
        entry: the value of `shares_encoder_with` in the draft's config.json.
        target: the model that the caller gives as the target, or None.
        adapter: as in `model.load`, but must be None.

    Raises:
        UserError: `target` is None or another model, or `adapter` is not None.
    """
    facts = entry if isinstance(entry, dict) else {}
    made_for = f"is a draft for {shown(facts.get('model') or 'a target without a name')}"
    if target is None:
        raise UserError(
            f"{folder} {made_for} and works with that alone, as it uses its encoder: give it as "
            "--draft-model, or load(folder, shared_with=target)"
        )
    actual = fingerprint(target)
    if target.adapted:
        del actual[WEIGHTS]
    if not same_model(facts, actual):
        raise UserError(
            f"{folder} {made_for}, and the target is another model; give it with its own target, "
            "or make a draft for this one"
        )
    if adapter is not None:
        raise UserError(f"{folder} uses its target's encoder; merge the adapter into that")
    return target


def whole(draft: T5) -> Any:
    """Returns a standalone float32 copy of a draft, with copies of the modules that it shared."""
    target = draft.shares_with
    assert target is not None, "it shares"
    names = [name for name in SHARED if getattr(target, name, None) is not None]
    standalone = type(draft)(draft.config, separate_head="lm_head" in names)
    weights = plain_weights(draft.decoder, "decoder.")
    for name in names:
        weights |= plain_weights(getattr(target, name), f"{name}.")
    fill(standalone, iter(weights.items()), mx.float32)
    return standalone
