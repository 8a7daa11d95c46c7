"""What lies beside an output while it is not complete, so that `--resume` continues the same job.

The first line of OUTPUT.resume is an object of what the results depend on: models, settings, the
beginning of the input. What texts do not depend on, such as the batch size, or a draft where they
are those of the target alone, is not in it. The lines after it are the numbers of prompts that
ended in an error, which a line of text does not show.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.cli.arguments import option_of
from mlx_t5.cli.output import ARRAY
from mlx_t5.cli.resume import OTHERWISE
from mlx_t5.disk import replace_file
from mlx_t5.errors import UserError, shown
from mlx_t5.settings import AUTO, SETTINGS

if TYPE_CHECKING:
    from mlx_t5.loading import ModelPair

SUFFIX = ".resume"
INPUT = "--input-file"
# Settings that change no text; the second does where proposals have a say in it.
WITHOUT_EFFECT = ("batch_size", "num_draft")
Facts = Mapping[str, Any]


def beginning(input_file: str | None) -> Any:
    """Size and digest of an input, which may grow; None if it can be read only once."""
    if input_file in (None, "-") or not os.path.isfile(input_file):
        return None
    size = os.path.getsize(input_file)
    return {"bytes": size, "sha256": _digest(input_file, size)}


def _digest(input_file: str, size: int) -> str | None:
    """The digest of the first bytes of a file; None if it has fewer."""
    digest = hashlib.sha256()
    with open(input_file, "rb") as file:
        while size and (read := file.read(min(size, 1 << 20))):
            digest.update(read)
            size -= len(read)
    return None if size else digest.hexdigest()


class RunRecord:
    """The record of one output; without an output it does nothing.

    Attributes:
        path: where it lies.
        existed: whether an earlier run has left one, if that is to be resumed.
        failed: numbers of the prompts that have ended in an error.
    """

    def __init__(
        self, output_file: str = "", facts: Facts | None = None, input_file: str = "-"
    ) -> None:
        """Names the record.

        Args:
            output_file: what it lies beside.
            facts: see `facts_of`; None if the output cannot be resumed.
            input_file: where the prompts come from.
        """
        self._output = output_file
        self.path = Path(f"{output_file}{SUFFIX}")
        self._facts, self._input, self.existed = facts or {}, input_file, False
        self.failed: list[int] = []
        self._written = False

    def resume(self) -> None:
        """Checks that an output that is there is one of this job.

        Raises:
            UserError: it is not, or the record is damaged.
        """
        self.existed = self.path.exists()
        written = os.path.exists(self._output) and os.path.getsize(self._output)
        if not self.existed or not written:
            return
        try:
            first, *numbers = self.path.read_text("utf-8").split("\n")[:-1]
            before = dict(json.loads(first))
            self.failed = [int(number) for number in numbers]
            changed = [name for name, value in self._facts.items() if self._differs(name, before)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            cure = f"remove it to have nothing checked, or {OTHERWISE}"
            raise UserError(f"{self.path} is damaged ({shown(str(error))}); {cure}") from None
        if changed:
            how = _described(changed[0], before[changed[0]])
            raise UserError(f"{self._output} was written {how}; give that again, {OTHERWISE}")

    def _differs(self, name: str, before: Facts) -> bool:
        if name not in before:  # by an earlier version
            return False
        if name == INPUT and self._facts[name] and before[name]:
            return _digest(self._input, before[name]["bytes"]) != before[name]["sha256"]
        return name != INPUT and self._facts[name] != before[name]

    def failed_of(self, first: int) -> bool:
        """Whether one of the first prompts ended in an error; forgets those after them."""
        self.failed = [n for n in self.failed if n <= first]
        return bool(self.failed)

    def begin(self) -> None:
        """Writes the record of an output that has been opened, in the place of an earlier one's.

        Raises:
            UserError: the disk is full.
        """
        if not os.path.isfile(self._output) or not os.access(self.path.parent, os.W_OK):
            return  # a device, or a folder that is closed: then nothing is checked
        if not self._facts:
            self.path.unlink(missing_ok=True)
            return
        lines = [json.dumps(self._facts), *map(str, self.failed), ""]
        replace_file(self.path, lambda path: path.write_text("\n".join(lines), "utf-8"))
        self._written = True

    def fail(self, number: int) -> None:
        """Notes a prompt that has ended in an error."""
        if self._written and number not in self.failed[-1:]:  # several samples of one
            self.failed.append(number)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{number}\n")

    def finish(self, status: int) -> int:
        """Removes the record of an output that is complete and has no error.

        Args:
            status: the exit status; 0 says so.

        Returns:
            The same.
        """
        if self._facts and not status:
            with contextlib.suppress(OSError):
                self.path.unlink()
        return status


def _described(name: str, value: Any) -> str:
    """How an output was written, if not as it is wanted now."""
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {name}"
    if value is None:
        return f"without {name}"
    plain = isinstance(value, (int, float, str))
    return f"with {name} {shown(str(value))}" if plain else f"with another {name}"


# ---- what results depend on ----------------------------------------------------------------------


def opaque(value: str) -> dict[str, str]:
    """A fact whose value says nothing to a person."""
    return {"value": value}


def record_of(args: argparse.Namespace, prefix: str, chosen: ModelPair) -> RunRecord:
    """What lies beside an output file, if there is one; arguments as for `facts_of`.

    Raises:
        UserError: as there; or with --resume, the output is of another job.
    """
    output_file, resumable = args.output_file or "", args.input_file or args.split != "none"
    if not output_file or output_file.endswith(ARRAY) or not resumable:
        return RunRecord(output_file)
    facts = facts_of(args, prefix, chosen)
    record = RunRecord(output_file, json.loads(json.dumps(facts)), args.input_file)
    if args.resume:
        record.resume()
    return record


def facts_of(args: argparse.Namespace, prefix: str, chosen: ModelPair) -> Facts:
    """What the results of a command line depend on, by the names of its options.

    Args:
        args: the options, with the settings of the model's own files.
        prefix: that is put before every prompt.
        chosen: the models.

    Raises:
        UserError: a model's or the input's files cannot be read.
    """
    from mlx_t5.checkpoints.checkpoint import open_checkpoint
    from mlx_t5.checkpoints.identity import adapter_identity, identity
    from mlx_t5.network.weights import compute_dtype

    with open_checkpoint(chosen.target) as checkpoint:
        dtype = str(compute_dtype(args.dtype, checkpoint)).removeprefix("mlx.core.")
    adapter = chosen.adapter and opaque(adapter_identity(chosen.adapter))
    facts = {
        "--score": args.score,
        "--embed": args.embed,
        "--model": opaque(identity(chosen.target)),
        "--adapter-path": adapter,
        "--dtype": dtype,
        "--task": opaque(prefix) if prefix and args.prefix is None else None,
        "--prefix": args.prefix,
    }
    if args.score or args.embed:
        return facts | {"--normalize": args.normalize}
    of_documents = ("split", "source_language", "max_source_tokens")
    facts |= {option_of(name): vars(args)[name] for name in ("json", *of_documents)}
    if not args.json:  # objects have their prompts in them
        facts[INPUT] = beginning(args.input_file)
    return facts | _of_texts(vars(args), chosen)


def _of_texts(options: Mapping[str, Any], chosen: ModelPair) -> dict[str, Any]:
    """The settings that decide about texts."""
    asked = {"beams": options["num_beams"] > 1, "sampling": options["temp"] > 0, None: True}
    names = [name for name, setting in SETTINGS.items() if asked[setting.only_with]]
    names = [*(name for name in names if name not in WITHOUT_EFFECT), "stop", "exact"]
    facts = {option_of(name): options[name] for name in names}
    if options["delta"] > 0:  # the proposals have a say in the text
        from mlx_t5.checkpoints.identity import identity

        draft = chosen.draft and opaque(identity(chosen.draft))
        facts[INPUT] = beginning(options["input_file"])  # which may have predictions
        facts["--draft-model"] = [draft, "lookup" if chosen.lookup else None]
        facts["--num-draft"] = AUTO if options["num_draft"] is None else options["num_draft"]
    return facts
