"""Converts a Hugging Face T5 checkpoint into an MLX model folder: the body of `mlx_t5.convert`.

Tensors are loaded, merged with an adapter, cast, quantized and
saved one after the other, so the memory needed does not depend on the number of layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_t5.backend import mx
from mlx_t5.checkpoints import hub, writing
from mlx_t5.checkpoints.adapters import adapter_folder
from mlx_t5.checkpoints.checkpoint import ENTRY, Checkpoint, cast, keep_float32
from mlx_t5.checkpoints.names import has_decoder
from mlx_t5.checkpoints.quantization import Quantization, Recipe, changes, quantized
from mlx_t5.cli.arguments import DTYPES
from mlx_t5.cli.uploading import check_repository, conversion_card, upload
from mlx_t5.disk import absolute
from mlx_t5.errors import UserError, log, readable
from mlx_t5.installation import MODELS
from mlx_t5.text.languages import checked_template
from mlx_t5.text.tokenizer import save_tokenizer


def convert_command(options: dict[str, Any]) -> int:
    model, upload_repo = options.pop("model"), options.pop("upload_repo", None)
    if upload_repo is not None:
        check_repository(upload_repo)
    default = MODELS / absolute(model).name
    if "adapter_path" in options:  # a merged adapter makes a different model, with its own name
        default = default.with_name(f"{default.name}-{absolute(options['adapter_path']).name}")
    path = convert(model, options.pop("mlx_path", default), **options)
    print(path, flush=True)
    if upload_repo is None:
        return 0
    return upload(path, upload_repo, lambda name: conversion_card(name, path, model))


def convert(
    source: str | Path,
    mlx_path: str | Path,
    dtype: str = "bfloat16",
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    quant_predicate: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    adapter_path: str | Path | None = None,
    encoder_only: bool = False,
    translation_prefix: str = "",
) -> Path:
    """Converts a Hugging Face T5 checkpoint into an MLX model folder.

    Args:
        source: a local folder or a Hub id.
        mlx_path: the folder to write; it appears only when it is complete.
        dtype: "bfloat16", "float16" or "float32". With float16 the feed-forward's output layers
            `wo` stay in float32, because T5's values there overflow float16.
        quantize: whether to quantize attention and feed-forward. Norms and bias tables stay in
            `dtype`. By default the embedding and the output head stay in `dtype` too, unless the
            vocabulary has at least `LARGE_VOCABULARY` tokens: then both get 8 bits.
        q_bits: bits per weight; None is the mode's default.
        q_group_size: number of weights that share a scale; None is the mode's default.
        q_mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        quant_predicate: which layers get how many bits: one of `PREDICATES`; None
            chooses by the vocabulary's size.
        revision: branch, tag or commit, if `source` is a Hub id.
        overwrite: whether to replace an earlier conversion at `mlx_path`.
        adapter_path: folder of a PEFT LoRA adapter, which is merged before anything is quantized.
        encoder_only: whether to leave out the decoder and the output head, for embeddings.
        translation_prefix: template of the prefix that translates, kept in config.json, such as
            "translate {source} to {target}: "; "" keeps the source's or the adapter's.

    Returns:
        The absolute path of the folder written.

    Raises:
        UserError: an option is invalid, the output exists, the source cannot be accessed, the
            checkpoint is damaged or is not a T5, the adapter cannot be merged, or the disk is full.
            No incomplete output stays at `mlx_path`.
    """
    mx.reset_peak_memory()
    path = absolute(mlx_path)
    q_options = (q_bits, q_group_size, q_mode, quant_predicate)
    if not quantize and q_options != (None, None, "affine", None):
        raise UserError("--q-bits, --q-group-size, --q-mode and --quant-predicate require -q")
    recipe = Recipe.from_options(*q_options) if quantize else None
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose {', '.join(DTYPES)}")
    writing.check_output_folder(path, overwrite)
    if adapter_path is not None:
        adapter_folder(adapter_path)  # before anything is downloaded
    folder = hub.source_folder(str(source), revision)
    writing.check_output_folder(path, overwrite, source=folder)
    template = checked_template(translation_prefix) if translation_prefix else None
    checkpoint = Checkpoint.open(folder, adapter_path, encoder_only)
    raw = checkpoint.raw | ({"translation_prefix": template} if template else {})
    if ENTRY in raw or checkpoint.config.draft_vocab_size:
        raise UserError("the source is a draft, ready to use: give its folder as --draft-model")
    if checkpoint.is_mlx:
        raise UserError("the source is an MLX folder already; convert the original")
    shapes = {name: tensor.shape for name, tensor in checkpoint.weights.items()}
    layers: dict[str, Quantization] = {}
    if quantize:
        recipe = Recipe.from_options(*q_options, vocab_size=checkpoint.config.vocab_size)
        layers = _quantized_layers(recipe, shapes, dtype, quant_predicate is None)
    asked = dict(layers)
    bar = tqdm(total=len(shapes), desc="converting", disable=None)
    with writing.new_model_folder(path, overwrite, folder) as partial, bar:
        tensors = _converted(checkpoint.tensors(), getattr(mx, dtype), layers, bar)
        writing.save_weights(partial, tensors, "mlx")
        writing.copy_modules(folder, partial)
        save_tokenizer(checkpoint.tokenizer, folder, partial)
        raw["converted_from"] = hub.origin(str(source), revision, folder, adapter_path)
        # "dtype" is the name in transformers 5.
        raw |= {name: dtype for name in ("torch_dtype", "dtype") if name in {"torch_dtype", *raw}}
        if not has_decoder(shapes):
            raw["architectures"] = [f"{raw['model_type'].upper()}EncoderModel"]
        if recipe:
            entry = recipe.entry({n.removesuffix(".weight"): how for n, how in layers.items()})
            # Two entries, as in mlx-lm: MLX reads the first, the Hugging Face Hub shows the second.
            raw["quantization"] = raw["quantization_config"] = entry
        writing.write_json(partial / "config.json", raw)
    print(changes(asked, layers, dtype), end="", file=sys.stderr)
    if checkpoint.tokenizer is None:
        log(f"note: {folder} has no tokenizer: add its files, or give token ids in Python")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    bits = 8 * size / sum(map(math.prod, shapes.values()))
    peak = readable(mx.get_peak_memory())
    log(f"{readable(size)} · {bits:.2f} bits per weight · peak memory {peak}")
    return path


def _converted(
    tensors: Iterator[tuple[str, mx.array]],
    dtype: mx.Dtype,
    layers: dict[str, Quantization],
    bar: tqdm,
) -> Iterator[tuple[str, mx.array]]:
    """Casts and quantizes each tensor; `layers` then has the settings that were taken."""
    for name, array in tensors:
        array = cast(name, array, mx.float32 if keep_float32(name, dtype) else dtype)
        yield from quantized(name, array, layers).items()
        del array  # before the next tensor is read
        bar.update()


def _quantized_layers(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], dtype: str, chosen_by_size: bool
) -> dict[str, Quantization]:
    if recipe.embedding and chosen_by_size:
        note = "the embedding and the output head get 8 bits; avoid it by --quant-predicate layers"
        print(f"{shapes['shared.weight'][0]:,} tokens: {note}", file=sys.stderr)
    layers = {name: how for name, shape in shapes.items() if (how := recipe.for_layer(name, shape))}
    if not layers:
        cause = f"no layer's rows divide into groups of {recipe.general.group_size}"
        raise UserError(f"{cause}; choose a smaller --q-group-size or another --q-mode")
    requested = [name for name in shapes if recipe.requested(name.removesuffix(".weight"))]
    if odd := len(requested) - len(layers):
        unfit = f"{odd} layers do not divide into groups of {recipe.general.group_size}"
        fitting = [n for n in requested if n not in layers and shapes[n][-1] % 32 == 0]
        cure = f"; {len(fitting)} of them would with --q-group-size 32" if fitting else ""
        log(f"{unfit} and stay {dtype}{cure}")
    return layers
