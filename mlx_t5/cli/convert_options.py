"""The options of `mlx_t5.convert`; they follow mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mlx_t5.checkpoints.recipes import LARGE_VOCABULARY, MODES, PREDICATES
from mlx_t5.cli import arguments
from mlx_t5.cli.arguments import DTYPES, Option, Parser, at_least

OPTIONS = {
    "model": Option("a Hub id or a local folder", arguments.REQUIRED, group="source"),
    "revision": Option("branch, tag or commit of a Hub repository"),
    "adapter_path": arguments.ADAPTER_PATH.but(
        help="a PEFT LoRA adapter to merge into the weights"
    ),
    "encoder_only": Option("leave out the decoder, for embeddings", False, bool),
    "translation_prefix": arguments.TRANSLATION_PREFIX,
    "mlx_path": Option(
        "folder to write (default: models/NAME[-ADAPTER])", metavar="FOLDER", group="output"
    ),
    "dtype": Option("type of weights that are not quantized", "bfloat16", DTYPES),
    "overwrite": Option("replace an earlier conversion", False, bool),
    "quantize": Option("quantize weights", False, bool, names="-q", group="quantization"),
    "q_bits": Option("bits per weight: 2, 3, 4, 5, 6 or 8 (default: the mode's)", kind=at_least(1)),
    "q_group_size": Option("weights that share a scale (default: the mode's)", kind=at_least(1)),
    "q_mode": Option("format of quantized weights", "affine", tuple(MODES)),
    "quant_predicate": Option(
        "vo_4_5: 4 bits per weight, but 5 in attention's values and outputs; embed_8: also "
        "quantize the embedding and the output head, to 8 bits (the default for "
        f"{LARGE_VOCABULARY:,} tokens or more); layers: never quantize these two; one "
        f"of {', '.join(PREDICATES)}",
        kind=PREDICATES,
        metavar="NAME",
    ),
    "upload_repo": arguments.UPLOAD_REPO,
}


def read_convert_options(argv: Sequence[str] | None) -> dict[str, Any]:
    """The options that the user gives, by name."""
    return Parser(
        "convert",
        "--model t5-11b",
        "--model google/flan-t5-xl -q --mlx-path models/flan-xl-4bit",
        needs="--model NAME",
        description="Convert a Hugging Face T5 checkpoint into an MLX model folder.",
    ).given(OPTIONS, argv)


main = partial(
    arguments.run_command, "convert", read_convert_options, "interrupted; nothing was written"
)
