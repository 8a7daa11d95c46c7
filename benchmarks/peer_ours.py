"""This project as one of the programs that are compared, and its models as the others read them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.options import DRAFT
from benchmarks.peer_systems import Ids, Program
from benchmarks.subject import Subject, decoding
from convert import convert
from decoder import SpeculativeDecoder
from mlx_t5.backend import mx
from mlx_t5.checkpoints.checkpoint import SAFETENSORS, open_checkpoint
from mlx_t5.cli.models import locate
from mlx_t5.drafting.shared_draft import save_draft
from mlx_t5.errors import UserError
from mlx_t5.network.config import T5Config
from mlx_t5.network.weights import read_config, read_mlx, tensor_names


class Ours(Program):
    """This project's own decoders."""

    def __init__(self, model: str, draft_model: str, dtype: str | None):
        """Loads a pair, as `Subject.load` does."""
        self.names = (model, draft_model)
        self.subject = Subject.load(model, draft_model, dtype)
        self.decoders: dict[int | str, SpeculativeDecoder] = {}

    def describe(self) -> dict[str, Any]:
        """As `Program.describe`."""
        return machine.environment(machine.dtype_of(self.subject.target))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The source tokens of each text."""
        return [list(self.subject.tokenizer.encode(text)) for text in texts]

    def folders(self, scratch: str) -> list[str]:
        """Target and draft as the other programs read them, made in `scratch` if they have to be.

        Raises:
            UserError: the weights are quantised.
        """
        target, draft = (locate(name, convert) for name in self.names)
        if self.subject.draft.shares_with is not None:  # they cannot read a decoder alone
            whole = Path(scratch, "standalone")
            draft = save_draft(self.subject.draft, target, whole, standalone=True)
        places = {"target": target, "draft": draft}
        return [str(hugging_face_folder(f, Path(scratch, name))) for name, f in places.items()]

    def decode(
        self, prompts: Ids, num_draft: int | str, max_tokens: int, batch_size: int
    ) -> list[list[int]]:
        """As `Program.decode`."""
        if num_draft not in self.decoders:
            bare = replace(self.subject, tokenizer=None)  # ids to ids, as the others do
            decoder = bare.speculative(DRAFT, num_draft) if num_draft else bare.regular()
            self.decoders[num_draft] = decoder
        decode = decoding(self.decoders[num_draft], [prompts], batch_size, max_tokens=max_tokens)
        return [result.tokens for result in decode(0)]


def hugging_face_folder(folder: Path, scratch: Path) -> Path:
    """The folder itself if transformers can read it; otherwise one in `scratch` that it can.

    Args:
        folder: of Hugging Face, or as convert.py writes it.
        scratch: made if it is needed.

    Raises:
        UserError: the weights are quantised.
    """
    with open_checkpoint(folder) as checkpoint:
        if checkpoint.metadata.get("format") != "mlx":
            return folder
    raw = read_config(folder)
    if raw.get("quantization"):
        raise UserError(f"{folder} is quantised for MLX, which nothing else reads; compare without")
    theirs = {ours: name for name, ours in tensor_names(T5Config.from_dict(raw)).items()}
    scratch.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, scratch)
    tensors = {theirs[name]: array for name, array in read_mlx(folder)}
    mx.save_safetensors(str(scratch / SAFETENSORS), tensors, metadata={"format": "pt"})
    return scratch
