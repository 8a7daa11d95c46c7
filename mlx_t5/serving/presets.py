"""What a model's own files want of requests, and how many texts a request gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_t5.checkpoints.generation_config import FILE, Preset
from mlx_t5.serving import api
from mlx_t5.serving.errors import ApiError
from mlx_t5.settings import SETTINGS, Settings

OF_BEAMS = [name for name, s in SETTINGS.items() if s.only_with == "beams" and s.request]


@dataclass(frozen=True)
class Presets:
    """What the model's own files want.

    Attributes:
        general: of every request.
        tasks: of those that name one.
    """

    general: Preset = Preset(FILE)
    tasks: Mapping[str, Preset] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines about what is left out: of every request, and of tasks."""
        names = dict.fromkeys(name for task in self.tasks.values() for name in task.left_out)
        tasks = Preset("tasks", left_out=tuple(names))
        return [preset.note for preset in (self.general, tasks) if preset.left_out]


def several(
    settings: Settings,
    body: api.Decoding,
    samples: int = 1,
    stream: bool = False,
    logprobs: int | None = None,
    **_: Any,
) -> Settings:
    """Settings for so many texts a prompt: those of one search, or sampled ones.

    Args:
        settings: of the request, its task and the server.
        body: the request.
        samples: texts a prompt.
        stream: as of `Job`.
        logprobs: as of `Job`.

    Raises:
        ApiError: they cannot be had, or not in this way.
    """
    beams, search = f"num_beams is {settings.num_beams}", settings.num_beams > 1
    refusals = {
        "stream": (search and stream, f"{beams}: a text is known at its end; leave stream out"),
        "logprobs": (search and logprobs is not None, f"{beams}: beams have none; leave them out"),
        "n": (
            search and samples > settings.num_beams,
            f"n is {samples} and {beams}; n is too many",
        ),
        "temperature": (
            samples > 1 and not search and settings.temp == 0,
            f"n is {samples}, but greedy texts would be equal; set temperature above 0",
        ),
        "num_beams": (
            not search and not body.given.keys().isdisjoint(OF_BEAMS),
            f"{' and '.join(OF_BEAMS)} need num_beams above 1",
        ),
    }
    for name, (refused, message) in refusals.items():
        if refused:
            raise ApiError(400, message, "n" if name == "temperature" else name)
    return replace(settings, num_return_sequences=samples) if search else settings
