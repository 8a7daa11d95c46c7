"""What the rows of a batch sample by, collected from their settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_t5.backend import mx
from mlx_t5.requests import Row, Settings
from mlx_t5.sampling.draws import Sampling
from mlx_t5.sampling.processors import Processing


def sampling_of(rows: Sequence[Row], eos: Sequence[int], by_position: int = 0) -> Sampling:
    """Collects the settings and keys of B rows.

    Args:
        rows: the rows.
        eos: the end tokens.
        by_position: as in `Sampling`.
    """
    settings = [row.settings for row in rows]

    def each(name: str) -> list:
        return [getattr(own, name) for own in settings]

    sampling = Sampling.collect(
        each("temp"),
        each("top_k"),
        each("top_p"),
        each("delta"),
        processing_of(settings, eos),
    )
    if sampling.all_greedy:
        return sampling
    keys = mx.stack([row.key for row in rows])
    return replace(sampling, keys=keys, by_position=by_position)


def processing_of(settings: Sequence[Settings], eos: Sequence[int]) -> Processing | None:
    """Collects the rules for the text of several rows; None if there are none."""

    def each(name: str) -> list:
        return [getattr(own, name) for own in settings]

    return Processing.collect(
        each("repetition_penalty"),
        each("no_repeat_ngram_size"),
        each("min_tokens"),
        each("logits_processors"),
        eos,
    )
