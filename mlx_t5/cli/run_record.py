"""Records the options of an incomplete output, so that `--resume` does not mix two jobs.

The file OUTPUT.resume, beside the output, has a JSON object with every option that may change a
text. The models, the adapter and the input file are recorded by digests of their contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import option_of
from mlx_t5.cli.output import ARRAY
from mlx_t5.cli.resume import OTHERWISE
from mlx_t5.disk import replace_file
from mlx_t5.errors import UserError, shown

if TYPE_CHECKING:
    from mlx_t5.loading import ModelPair

WITHOUT_EFFECT = ("batch_size", "verbose", "resume", "output_file", "prompt", "regular_decode")


@dataclass(frozen=True)
class RunRecord:
    """The record of one output.

    Attributes:
        output_file: the output; "" if no record is kept.
        options: the recorded options by their names on the command line; see `record_of`.
    """

    output_file: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path of the record."""
        return Path(f"{self.output_file}.resume")

    def check(self) -> None:
        """Checks that the output, if it has a record, was written with the same options.

        Raises:
            UserError: the options differ, or the record is damaged.
        """
        try:
            if not os.path.getsize(self.output_file):
                return
            before = dict(json.loads(self.path.read_text("utf-8")))
        except FileNotFoundError:
            return
        except (ValueError, TypeError, RecursionError) as error:
            cure = f"remove it to have nothing checked, or {OTHERWISE}"
            raise UserError(f"{self.path} is damaged ({shown(str(error))}); {cure}") from None
        for name in self.options | before:
            if (value := before.get(name)) != self.options.get(name):
                how = f"was written with another {name} ({shown(json.dumps(value))})"
                raise UserError(f"{self.output_file} {how}; give that again, {OTHERWISE}")

    def begin(self) -> None:
        """Writes the record beside the output file; replaces an earlier record.

        Raises:
            UserError: the record cannot be written.
        """
        # A device gets no record, and neither does an output in a folder that is not writable.
        if os.path.isfile(self.output_file) and os.access(self.path.parent, os.W_OK):
            text = json.dumps(self.options, indent=1)
            replace_file(self.path, lambda path: path.write_text(text, "utf-8"))

    def finish(self, status: int) -> int:
        """Removes the record if the exit status is 0; returns the status."""
        if self.output_file and not status:
            with contextlib.suppress(OSError):
                self.path.unlink()
        return status


def record_of(options: Mapping[str, Any], chosen: ModelPair) -> RunRecord:
    """Returns the record of an output; standard output and NumPy arrays get an empty record.

    Args:
        options: all options by name, including settings from the model's own files.
        chosen: the models.

    Raises:
        UserError: a model's files cannot be read.
    """
    output_file = options["output_file"] or ""
    if not output_file or output_file.endswith(ARRAY):
        return RunRecord()
    from mlx_t5.checkpoints.checkpoint import open_checkpoint
    from mlx_t5.checkpoints.identity import adapter_identity, identity
    from mlx_t5.network.weights import compute_dtype

    with open_checkpoint(chosen.target) as checkpoint:
        dtype = str(compute_dtype(options["dtype"], checkpoint))
    lenient = options["delta"] > 0  # then the proposals influence the text
    facts = {
        "json": None,  # first: only the first difference is reported, and others may follow from it
        "delta": None,
        **{name: value for name, value in options.items() if name not in WITHOUT_EFFECT},
        "model": identity(chosen.target),
        "adapter_path": chosen.adapter and adapter_identity(chosen.adapter),
        "dtype": dtype,
        # JSON lines contain their prompts, but not the predictions that a draft may copy.
        "input_file": _digest(options["input_file"]) if lenient or not options["json"] else None,
        "draft_model": [chosen.draft and identity(chosen.draft), chosen.lookup]
        if lenient
        else None,
        "num_draft": options["num_draft"] if lenient else None,
    }
    facts = {option_of(name): value for name, value in facts.items()}
    return RunRecord(output_file, json.loads(json.dumps(facts)))


def _digest(input_file: str | None) -> str | None:
    """Returns a digest of a file's content and suffix; None if it is not a regular file."""
    if not input_file or not os.path.isfile(input_file):
        return None
    digest = hashlib.sha256(Path(input_file).suffix.encode())
    with open(input_file, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
