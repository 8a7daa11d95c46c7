"""A job: what a Python caller, main.py or a request to the server asks of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.settings import Settings
from mlx_t5.text.documents import Cutting
from mlx_t5.text.prompts import checked_samples


@dataclass(frozen=True, eq=False)
class Job:
    """How the prompts of a call are decoded, and what kind of answer they get.

    Attributes:
        settings: the settings of every text.
        seed: one seed, from which prompt i gets the random stream i, or a list with a seed per
            prompt.
        num_samples: texts per prompt; each text has its own random stream.
        cutting: how texts are cut into pieces; None if each prompt is decoded as a whole.
        predictions: the expected output of each prompt, or None; the last ones may be missing.
        stream: whether a text is answered in chunks while it grows.
        by_token: whether `Chunk.pieces` has the text of each token, even without a stream.
        logprobs: how many likeliest tokens are reported with each token; None reports nothing.
    """

    settings: Settings
    seed: int | Sequence[int] = 0
    num_samples: int = 1
    cutting: Cutting | None = None
    predictions: Iterable[str | Sequence[int] | None] = ()
    stream: bool = False
    by_token: bool = False
    logprobs: int | None = None

    @property
    def watched(self) -> bool:
        """Whether tokens have to be converted to text while the text grows."""
        return self.stream or self.by_token or self.logprobs is not None

    @classmethod
    def of(
        cls, defaults: Settings, values: dict[str, Any], num_samples: int = 1, **attributes: Any
    ) -> Job:
        """The job of a call; `values` are fields of `Settings` and `Cutting` by name."""
        names = {field.name for field in fields(Cutting)}
        cuts = {name: value for name, value in values.items() if name in names}
        cutting = Cutting(**cuts)
        if cutting.split == "none" and cutting != Cutting():
            raise UserError(f"{[*cuts][-1]} requires split")
        values = {name: value for name, value in values.items() if name not in names}
        if unknown := [*values.keys() - {field.name for field in fields(Settings)}]:
            call = "stream" if attributes.get("stream") else "generate"
            raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")
        if values.get("num_draft") is None:
            values["num_draft"] = defaults.num_draft
        settings = replace(defaults, **values)
        samples = checked_samples(num_samples, settings.temp)
        whole = cutting.split == "none"
        return cls(settings, num_samples=samples, cutting=None if whole else cutting, **attributes)
