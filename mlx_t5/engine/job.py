"""A job for the engine, from a Python caller, from main.py or from a request to the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mlx_t5.errors import UserError
from mlx_t5.settings import Settings
from mlx_t5.text.documents import Cutting
from mlx_t5.text.prompts import checked_samples


@dataclass(frozen=True)
class Job:
    """How the prompts of a call are decoded.

    Attributes:
        settings: the settings of every text.
        seed: one seed, of which prompt i uses random stream i, or one seed per prompt.
        num_samples: texts per prompt, each from its own random stream.
        cutting: how texts are cut into pieces; None if each prompt is decoded as a whole.
    """

    settings: Settings
    seed: int | Sequence[int] = 0
    num_samples: int = 1
    cutting: Cutting | None = None

    @classmethod
    def of(
        cls, defaults: Settings, seed: int | Sequence[int], num_samples: int, given: dict[str, Any]
    ) -> Job:
        """Returns the job of a call.

        Args:
            defaults: the values of settings that are not given.
            seed: see the attributes.
            num_samples: see the attributes.
            given: fields of `Settings` and `Cutting`, by name; num_draft=None counts as not given.

        Raises:
            UserError: a value is out of range, or a field of `Cutting` is given without a split.
        """
        names = {field.name for field in fields(Cutting)}
        cuts = {name: value for name, value in given.items() if name in names}
        cutting = Cutting(**cuts)
        if cutting.split == "none" and cutting != Cutting():
            raise UserError(
                f'{[*cuts][-1]} goes with split; give split="sentences", or leave it out'
            )
        given = {name: value for name, value in given.items() if name not in names}
        if given.get("num_draft") is None:
            given["num_draft"] = defaults.num_draft
        settings = replace(defaults, **given)
        samples = checked_samples(num_samples, settings.temp)
        return cls(settings, seed, samples, None if cutting.split == "none" else cutting)
