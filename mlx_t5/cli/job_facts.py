"""What the results of a command line depend on: models, settings, the beginning of the input.

What texts do not depend on, such as the batch size, or a draft where they are those of the target
alone, is not among it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_t5.checkpoints.checkpoint import open_checkpoint
from mlx_t5.checkpoints.identity import adapter_identity, identity
from mlx_t5.cli.output import ARRAY
from mlx_t5.cli.run_record import INPUT, Facts, RunRecord, beginning
from mlx_t5.drafting.adaptive import usual_num_draft
from mlx_t5.network.weights import compute_dtype

if TYPE_CHECKING:
    from mlx_t5.cli.models import Pair
    from mlx_t5.requests import Settings

ALWAYS = (
    "max_tokens", "min_tokens", "repetition_penalty", "no_repeat_ngram_size", "stop", "temp",
    "delta", "exact", "num_samples", "num_beams", "num_return_sequences",
)  # fmt: skip
OF_BEAMS, OF_SAMPLES = ("length_penalty", "early_stopping"), ("top_k", "top_p", "seed")


class Opaque(dict):
    """A fact whose value says nothing to a person."""

    def __init__(self, value: str) -> None:
        super().__init__(value=value)


def record_of(
    args: argparse.Namespace, settings: Settings, prefix: str, chosen: Pair, as_json: bool
) -> RunRecord:
    """What lies beside the output of a command line; arguments as for `facts_of`.

    Raises:
        UserError: as there; or with --resume, the output is of another job.
    """
    lines = args.output_file and not args.output_file.endswith(ARRAY)
    if not (lines and args.input_file):
        return RunRecord(args.output_file or "")
    facts = facts_of(args, settings, prefix, chosen, as_json)
    record = RunRecord(args.output_file, json.loads(json.dumps(facts)), args.input_file)
    if args.resume:
        record.resume()
    return record


def facts_of(
    args: argparse.Namespace, settings: Settings, prefix: str, chosen: Pair, as_json: bool
) -> Facts:
    """What the results of a command line depend on, by the names of its options.

    Args:
        args: the options.
        settings: with the model's own wishes.
        prefix: that is put before every prompt.
        chosen: the models.
        as_json: whether lines are objects.

    Raises:
        UserError: a model's or the input's files cannot be read.
    """
    with open_checkpoint(chosen.target) as checkpoint:
        dtype = str(compute_dtype(args.dtype, checkpoint)).removeprefix("mlx.core.")
    adapter = chosen.adapter and Opaque(adapter_identity(chosen.adapter))
    facts = {
        "--score": args.score,
        "--embed": args.embed,
        "--model": Opaque(identity(chosen.target)),
        "--adapter-path": adapter,
        "--dtype": dtype,
        "--task": Opaque(prefix) if prefix else None,
    }
    if args.score or args.embed:
        return facts | {"--normalize": args.normalize}
    facts |= {"--json": as_json}
    if not as_json:  # objects have their prompts in them
        facts[INPUT] = beginning(args.input_file)
    return facts | _of_texts({**vars(args), **vars(settings)}, chosen)


def _of_texts(options: Mapping[str, Any], chosen: Pair) -> dict[str, Any]:
    """The settings that decide about texts."""
    names = list(ALWAYS)
    names += OF_BEAMS if options["num_beams"] > 1 else ()
    names += OF_SAMPLES if options["temp"] > 0 else ()
    facts = {f"--{name.replace('_', '-')}": options[name] for name in names}
    if options["temp"] > 0 or options["delta"] > 0:  # the proposals have a say in the text
        draft = chosen.draft and Opaque(identity(chosen.draft))
        facts["--draft-model"] = [draft, "lookup" if chosen.lookup else None]
        facts["--num-draft"] = (
            usual_num_draft() if options["num_draft"] is None else options["num_draft"]
        )
    return facts
