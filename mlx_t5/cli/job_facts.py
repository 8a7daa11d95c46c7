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
from mlx_t5.cli.arguments import option_of
from mlx_t5.cli.output import ARRAY
from mlx_t5.cli.run_record import INPUT, Facts, RunRecord, beginning
from mlx_t5.drafting.adaptive import usual_num_draft
from mlx_t5.network.weights import compute_dtype
from mlx_t5.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from mlx_t5.cli.models import Pair

# Settings that change no text; the second does where proposals have a say in it.
WITHOUT_EFFECT = ("batch_size", "num_draft")


class Opaque(dict):
    """A fact whose value says nothing to a person."""

    def __init__(self, value: str) -> None:
        super().__init__(value=value)


def record_of(args: argparse.Namespace, settings: Settings, prefix: str, chosen: Pair) -> RunRecord:
    """What lies beside an output file; arguments as for `facts_of`.

    Raises:
        UserError: as there; or with --resume, the output is of another job.
    """
    if args.output_file.endswith(ARRAY) or not args.input_file:
        return RunRecord(args.output_file)
    facts = facts_of(args, settings, prefix, chosen)
    record = RunRecord(args.output_file, json.loads(json.dumps(facts)), args.input_file)
    if args.resume:
        record.resume()
    return record


def facts_of(args: argparse.Namespace, settings: Settings, prefix: str, chosen: Pair) -> Facts:
    """What the results of a command line depend on, by the names of its options.

    Args:
        args: the options.
        settings: with those of the model's own files.
        prefix: that is put before every prompt.
        chosen: the models.

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
    facts |= {"--json": args.json}
    if not args.json:  # objects have their prompts in them
        facts[INPUT] = beginning(args.input_file)
    return facts | _of_texts({**vars(args), **vars(settings)}, chosen)


def _of_texts(options: Mapping[str, Any], chosen: Pair) -> dict[str, Any]:
    """The settings that decide about texts."""
    asked = {"beams": options["num_beams"] > 1, "sampling": options["temp"] > 0, None: True}
    names = [name for name, setting in SETTINGS.items() if asked[setting.only_with]]
    names = [*(name for name in names if name not in WITHOUT_EFFECT), "stop", "exact"]
    facts = {option_of(name): options[name] for name in names}
    if options["temp"] > 0 or options["delta"] > 0:  # the proposals have a say in the text
        draft = chosen.draft and Opaque(identity(chosen.draft))
        facts["--draft-model"] = [draft, "lookup" if chosen.lookup else None]
        facts["--num-draft"] = (
            usual_num_draft() if options["num_draft"] is None else options["num_draft"]
        )
    return facts
