"""Command line: converts a Hugging Face T5 checkpoint into an MLX model folder.

    python convert.py --model google-t5/t5-small

Options and output follow mlx-lm. Every tensor is read, cast, quantized and written a few rows at a
time, so the memory needed does not depend on the size of the model. tests/support/peak_memory.py
measures the memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_t5.cli.arguments import Parser, not_installed, run
from mlx_t5.cli.uploading import add_upload_option, check_repository, conversion_card, upload
from mlx_t5.errors import UserError, reason

try:
    from mlx_t5.backend import mx
    from mlx_t5.checkpoints.adapter_config import adapter_folder
    from mlx_t5.checkpoints.adapters import StoredAdapter, open_adapter
    from mlx_t5.checkpoints.checkpoint import Checkpoint, open_checkpoint
    from mlx_t5.checkpoints.folder import (
        BLOCK_BYTES,
        SHARD_BYTES,
        into_shards,
        is_model_file,
        new_model_folder,
        write_json,
        write_shards,
    )
    from mlx_t5.checkpoints.hub import origin, resolve
    from mlx_t5.checkpoints.output_folder import check_output_folder, require_apart
    from mlx_t5.checkpoints.quantization import (
        LARGE_VOCABULARY,
        MODES,
        PREDICATES,
        Quantization,
        Recipe,
    )
    from mlx_t5.checkpoints.sentence_modules import copy_modules, read_pooling
    from mlx_t5.checkpoints.small_files import place
    from mlx_t5.checkpoints.stored_tensor import READABLE
    from mlx_t5.network.config import T5Config
    from mlx_t5.network.layers import keep_float32
    from mlx_t5.network.sharing import ENTRY
    from mlx_t5.network.weights import cast, has_decoder, read_config
    from mlx_t5.text.tokenizer import load_tokenizer, save_tokenizer
    from model import select_tensors
except (ImportError, UserError) as error:
    if __name__ != "__main__":
        raise
    Parser().error(str(error) if isinstance(error, UserError) else not_installed(error))


@dataclass(frozen=True)
class Conversion:
    """The conversion of one tensor.

    Attributes:
        source: the tensor's name in the checkpoint.
        name: the tensor's name in the output.
        shape: the tensor's shape in the checkpoint.
        dtype: the floating-point type to convert to.
        quantization: how the tensor is quantized; None if it is not quantized.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    quantization: Quantization | None

    @property
    def path(self) -> str:
        """The dotted name of the tensor's layer in the model."""
        return self.name.removesuffix(".weight")

    def apply(self, rows: mx.array) -> dict[str, mx.array]:
        """Converts some rows of the tensor; returns the results, keyed by the output arrays' names.

        Raises:
            UserError: a number is too large for `dtype`.
        """
        rows = cast(self.source, rows, self.dtype)
        if self.quantization is None:
            return {self.name: rows}
        return self.quantization.quantize(self.name, rows)

    def outputs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the type and full shape of each output array by name, in the order of storage."""
        rows, *rest = self.shape
        sample = self.apply(mx.zeros((1, *rest), self.dtype))
        return {
            name: (str(array.dtype).removeprefix("mlx.core."), (rows, *array.shape[1:]))
            for name, array in sample.items()
        }


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
) -> Path:
    """Converts a Hugging Face T5 checkpoint into an MLX model folder.

    Args:
        source: a local folder or a Hub id.
        mlx_path: the folder to write; it appears only when it is complete.
        dtype: "bfloat16", "float16" or "float32". With float16 the feed-forward's output layers
            `wo` stay in float32, because T5's values there overflow float16.
        quantize: whether to quantize attention and feed-forward. Norms and bias tables stay in
            `dtype`. By default the embedding and the output head stay in `dtype` too, unless the
            vocabulary has at least `quantization.LARGE_VOCABULARY` tokens: then both get 8 bits.
        q_bits: bits per weight; None is the mode's default.
        q_group_size: number of weights that share a scale; None is the mode's default.
        q_mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        quant_predicate: which layers get how many bits: one of `quantization.PREDICATES`; None
            chooses by the vocabulary's size.
        revision: branch, tag or commit, if `source` is a Hub id.
        overwrite: whether to replace an earlier conversion at `mlx_path`.
        adapter_path: folder of a PEFT LoRA adapter, which is merged before anything is quantized.
        encoder_only: whether to leave out the decoder and the output head, for embeddings.

    Returns:
        The absolute path of the folder written.

    Raises:
        UserError: an option is invalid, the output exists, the source cannot be accessed, the
            checkpoint is damaged or is no T5, the adapter cannot be merged, or there is too little
            disk space. No incomplete output stays on the disk.
    """
    if not str(mlx_path):
        raise UserError("--mlx-path is empty; name the folder to write")
    path = place(mlx_path)
    q_options = (q_bits, q_group_size, q_mode, quant_predicate)
    if not quantize and q_options != (None, None, "affine", None):
        flags = "--q-bits, --q-group-size, --q-mode and --quant-predicate"
        raise UserError(f"{flags} have an effect only with -q")
    recipe = Recipe.from_options(*q_options) if quantize else None
    if dtype not in READABLE:
        raise UserError(f"unknown dtype {dtype!r}; choose {', '.join(READABLE)}")
    try:
        check_output_folder(path, overwrite, is_model_file)
        if adapter_path is not None:
            adapter_folder(adapter_path)  # before anything is downloaded
        folder = resolve(str(source), revision)
        require_apart(path, folder)
        raw = read_config(folder)
        config = T5Config.from_dict(raw)
        read_pooling(folder, config.d_model)  # refuses modules that could not be loaded
        tokenizer = load_tokenizer(folder)  # refuses a folder that could not be used
        recipe = recipe and _recipe_for(config.vocab_size, q_options)
        with open_checkpoint(folder) as checkpoint:
            steps = plan(raw, checkpoint, getattr(mx, dtype), recipe, encoder_only)
            shards = into_shards(steps, SHARD_BYTES)
            adapter = open_adapter(adapter_path, {step.source: step.shape for step in steps})
            with adapter, new_model_folder(path, overwrite, folder, shards) as partial:
                write_weights(partial, checkpoint, adapter, shards)
                raw["converted_from"] = origin(str(source), revision, folder, adapter_path)
                write_config(partial, raw, dtype, recipe, steps)
                copy_modules(folder, partial)
                save_tokenizer(tokenizer, folder, partial)
    except OSError as error:
        raise UserError(f"cannot convert {source} to {path}: {reason(error)}") from error
    return path


def _recipe_for(
    vocab_size: int, q_options: tuple[int | None, int | None, str, str | None]
) -> Recipe:
    recipe = Recipe.from_options(*q_options, vocab_size=vocab_size)
    if recipe.embedding and q_options[-1] is None:
        note = "the embedding and the output head get 8 bits; avoid it by --quant-predicate layers"
        print(f"{vocab_size:,} tokens: {note}", file=sys.stderr)
    return recipe


def plan(
    raw: dict,
    checkpoint: Checkpoint,
    dtype: mx.Dtype,
    recipe: Recipe | None,
    encoder_only: bool = False,
) -> list[Conversion]:
    """Returns one conversion per tensor to convert, in the order of the tensors on the disk.

    Args:
        raw: the source's config.json.
        checkpoint: the source's tensors.
        dtype: the type to convert to.
        recipe: how to quantize; None to quantize nothing.
        encoder_only: whether to leave out the decoder and the output head.

    Raises:
        UserError: the source is a draft or an MLX folder, the tensors are not those of the T5 that
            `raw` describes, a tensor has an unreadable type, or no layer can be quantized.
    """
    config = T5Config.from_dict(raw)
    if ENTRY in raw or config.draft_vocab_size:
        raise UserError("the source is a draft, ready to use: give its folder as --draft-model")
    if checkpoint.metadata.get("format") == "mlx":
        raise UserError("the source is an MLX folder already; convert the Hugging Face original")
    names = select_tensors(config, checkpoint, encoder_only)
    steps = []
    for source in filter(names.__contains__, checkpoint.names):
        checkpoint.require_readable(source)
        name, shape = names[source], checkpoint.shape(source)
        how = recipe.for_layer(name, shape) if recipe else None
        stored = mx.float32 if keep_float32(name, dtype) else dtype
        steps.append(Conversion(source, name, shape, stored, how))
    if recipe:
        _check_groups(steps, recipe, dtype)
    return steps


def _check_groups(steps: list[Conversion], recipe: Recipe, dtype: mx.Dtype) -> None:
    if not any(step.quantization for step in steps):
        cause = f"no layer's rows divide into groups of {recipe.general.group_size}"
        raise UserError(f"{cause}; choose a smaller --q-group-size or another --q-mode")
    unquantized = sum(
        not step.quantization and recipe.wanted(step.path) is not None for step in steps
    )
    if unquantized:
        print(f"{unquantized} layers do not divide into groups and stay {dtype}", file=sys.stderr)


def write_weights(
    folder: Path, checkpoint: Checkpoint, adapter: StoredAdapter, shards: list[list[Conversion]]
) -> None:
    """Merges the adapter into the tensors, converts them, and writes shards and their index."""

    def row_tiles(step: Conversion) -> Iterator[dict[str, mx.array]]:
        stored = checkpoint.row_tiles(step.source, BLOCK_BYTES)
        return map(step.apply, adapter.row_tiles(step.source, stored))

    write_shards(folder, shards, row_tiles, "mlx", "converting")


def write_config(
    folder: Path, raw: dict, dtype: str, recipe: Recipe | None, steps: list[Conversion]
) -> None:
    """Writes config.json: the source's entries, with the stored type and the quantization.

    Args:
        folder: the output folder.
        raw: the content of the source's config.json, with the entry `converted_from` added.
        dtype: the stored type.
        recipe: how layers are quantized; None if no layer is quantized.
        steps: the conversions of the stored tensors. If no tensor belongs to a decoder, the entry
            `architectures` becomes the class of the encoder alone.
    """
    config = raw | {"torch_dtype": dtype}
    if "dtype" in raw:  # the name in transformers 5
        config["dtype"] = dtype
    if not has_decoder(step.name for step in steps):
        config["architectures"] = [f"{raw['model_type'].upper()}EncoderModel"]
    if recipe:
        entry = recipe.entry({step.path: step.quantization for step in steps if step.quantization})
        # Two entries, as in mlx-lm: MLX reads the first, the Hugging Face Hub shows the second.
        config["quantization"] = config["quantization_config"] = entry
    write_json(folder / "config.json", config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run(lambda: _main(argv), interrupted="interrupted; nothing was written")


def _main(argv: Sequence[str] | None) -> int:
    options = vars(_parser().parse_args(argv))
    source, path, repository = map(options.pop, ("model", "mlx_path", "upload_repo"))
    check_repository(repository)
    default = Path("models") / place(source).name
    if options["adapter_path"]:  # a merged adapter makes a different model, with its own name
        default = default.with_name(f"{default.name}-{place(options['adapter_path']).name}")
    path = convert(source, default if path is None else path, **options)
    print(path, flush=True)
    return upload(path, repository, lambda name: conversion_card(name, path, source))


def _parser() -> Parser:
    parser = Parser(
        "convert.py --model t5-11b",
        "convert.py --model google/flan-t5-xl -q --mlx-path models/flan-xl-4bit",
        needs="--model NAME",
        description="Convert a Hugging Face T5 checkpoint into an MLX model folder.",
    )
    add = parser.add_argument_group("source").add_argument
    add("--model", required=True, help="a Hub id (t5-11b, google/flan-t5-xl) or a local folder")
    add("--revision", help="branch, tag or commit of a Hub repository")
    add("--adapter-path", metavar="FOLDER", help="a PEFT LoRA adapter to merge into the weights")
    add("--encoder-only", action="store_true", help="leave out the decoder, for embeddings")
    add = parser.add_argument_group("output").add_argument
    add(
        "--mlx-path",
        metavar="FOLDER",
        help="folder to write (default: models/NAME, NAME being the last part of --model; with an "
        "adapter models/NAME-ADAPTER)",
    )
    what = "type of weights that are not quantized (default: %(default)s)"
    add("--dtype", default="bfloat16", choices=list(READABLE), help=what)
    add("--overwrite", action="store_true", help="replace an earlier conversion")
    _add_quantization(parser.add_argument_group("quantization"))
    add_upload_option(parser.add_argument_group("upload"))
    return parser


def _add_quantization(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-q", "--quantize", action="store_true", help="quantize attention and feed-forward")
    what = "bits per weight: 2, 3, 4, 5, 6 or 8 (default: the mode's)"
    add("--q-bits", type=int, metavar="N", help=what)
    what = "weights that share a scale (default: the mode's)"
    add("--q-group-size", type=int, metavar="N", help=what)
    what = "format of quantized weights (default: %(default)s)"
    add("--q-mode", default="affine", choices=list(MODES), help=what)
    add(
        "--quant-predicate",
        choices=PREDICATES,
        metavar="NAME",
        help="vo_4_5: 4 bits per weight, but 5 in attention's values and outputs; embed_8: also "
        "quantize the embedding and the output head, to 8 bits (the default for "
        f"{LARGE_VOCABULARY:,} tokens or more); layers: never quantize these two; one of "
        f"{', '.join(PREDICATES)}",
    )


if __name__ == "__main__":
    sys.exit(main())
