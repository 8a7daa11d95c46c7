"""Drafts that use the encoder, the embedding and the output head of their target.

Such a draft is a decoder of few layers. A prompt is then encoded once for both models, and the
draft computes no more than its cross-attention; the shared modules are held once. They are the
target's: neither parameters of the draft nor written with it.

A draft fits the one model whose encoder it has learned to read, in whatever type and however
quantised that is. So its folder keeps the target's fingerprint (fingerprint.py). A draft goes with
its target with and without a LoRA adapter: of one with an adapter not all is compared. With the
wrong target a draft would only guess badly, as every proposal is verified: the fingerprint is there
to say so at once.

Several ranks may share the target. What its encoder gives, the norms and the embedding are whole on
each of them, and of an output head with weights of its own the draft gets a whole one. So it never
waits for other ranks, and it is no matter whether all of them draft or one does.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.backend import mx, nn
from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.errors import UserError, shown
from mlx_t5.network import memory
from mlx_t5.network.fingerprint import WEIGHTS, fingerprint, same_model
from mlx_t5.network.ranks import ALONE, ranks_of
from mlx_t5.network.weights import check, fill, quantize, read_config, read_shards, shapes_of

if TYPE_CHECKING:
    from model import T5

SHARED = ("shared", "encoder", "lm_head")  # modules of a T5 that a draft can use
ENTRY = "shares_encoder_with"  # in a draft's config.json: the fingerprint, and the target's name
OF_DRAFT = ("num_decoder_layers", "draft_vocab_size")  # what else its config.json says


def share(draft: nn.Module, target: T5) -> None:
    """Has a draft use the target's modules; `nn.Module` does not take them for the draft's own.

    Raises:
        UserError: ranks share the target, and its folder cannot be read any longer.
        RuntimeError: the device has not enough memory.
    """
    embedding = target.shared
    if ranks_of(target).size > 1:  # the draft asks no other rank, see `sharding.shard`
        embedding = copy(embedding)
        embedding.total = embedding.rows = None
    modules = {"shared": embedding, "encoder": target.encoder, "lm_head": full_head(target)}
    for name, module in {"shares_with": target, **modules}.items():
        if module is not None:
            vars(draft)[name] = module


def full_head(model: T5) -> nn.Module | None:
    """The output head of all tokens; None if it is the embedding. Nobody else is asked.

    If ranks share it, it is read from the model's folder, quantised as it is there. No adapter
    changes it. `model` is a `model.T5`; arguments and errors as of `share`.
    """
    if "lm_head" not in model or ranks_of(model).size == 1:
        return getattr(model, "lm_head", None)
    holder, config = nn.Module(), model.config
    holder.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
    with (
        open_checkpoint(model.folder) as stored,
        memory.room_for_weights(memory.loaded_bytes(stored, model.dtype, memory.HEADS)),
    ):
        names = {name: name for name in stored.names if name.startswith(memory.HEADS)}
        if len(names) > 1:
            quantize(holder, read_config(model.folder).get("quantization"), set(names))
        check({name: stored.shape(name) for name in names}, shapes_of(holder))
        fill(holder, read_shards(stored, names, ALONE), model.dtype)
    return holder.lm_head


def shared_draft(target: T5, num_decoder_layers: int, dtype: mx.Dtype = mx.float32) -> Any:
    """A draft that starts from the target's own decoder.

    Args:
        target: a `model.T5`; may be quantised.
        num_decoder_layers: of the draft. They are copies of the target's, evenly from the first on,
            not quantised; final norm and relative bias come along.
        dtype: of its parameters; as everywhere, `wo` stays in float32 where this is float16.

    Returns:
        A T5 whose parameters are its decoder's; `shares_with` is the target.

    Raises:
        UserError: the target has not so many layers.
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
    """A module's parameters by name, with `prefix` before it; what is quantised in float32."""
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
    """The weight of a quantised layer, in float32."""
    common = [layer["scales"], *([layer["biases"]] if "biases" in layer else [])]
    if mx.issubdtype(common[0].dtype, mx.floating):  # the other modes' scales are in 8 bits
        common = [array.astype(mx.float32) for array in common]
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer["weight"], *common, **how).astype(mx.float32)


def target_of(folder: Path, entry: Any, given: Any, adapter: Any, group: Any) -> Any:
    """The target that a folder's draft is to use.

    Args:
        folder: of the draft, for messages.
        entry: `ENTRY` of its config.json.
        given: the target at hand, a `model.T5`; None if there is none.
        adapter: as of `load`.
        group: likewise.

    Raises:
        UserError: the draft needs a target, is for another one than this, or is asked to have an
            adapter or a group.
    """
    facts = entry if isinstance(entry, dict) else {}
    made_for = f"is a draft for {shown(facts.get('model') or 'a target without a name')}"
    if given is None:
        raise UserError(
            f"{folder} {made_for} and works with that alone, as it uses its encoder: give it as "
            "--draft-model, or load(folder, shared_with=target)"
        )
    actual = fingerprint(given)
    if given.adapted:
        del actual[WEIGHTS]
    if not same_model(facts, actual):
        raise UserError(
            f"{folder} {made_for}, and the target is another model; give it with its own target, "
            "or make a draft for this one"
        )
    if adapter is not None:
        raise UserError(f"{folder} uses its target's encoder; merge the adapter into that")
    if group is not None:
        raise UserError(f"{folder} is a draft, whole on every rank; load it without a group")
    return given


def whole(draft: T5) -> Any:
    """A draft like one that shares, with copies of what that uses of its target, in float32."""
    target = draft.shares_with
    assert target is not None, "it shares"
    names = [name for name in SHARED if getattr(target, name, None) is not None]
    standalone = type(draft)(draft.config, separate_head="lm_head" in names)
    weights = plain_weights(draft.decoder, "decoder.")
    for name in names:
        weights |= plain_weights(getattr(target, name), f"{name}.")
    fill(standalone, iter(weights.items()), mx.float32)
    return standalone
