"""What ranks bring back, as JSON: texts, scores, vectors; and by what they know the same models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.machines.messages import Codec, fingerprint, of_kind, packed_item, unpacked_item
from mlx_t5.pairs import Score
from mlx_t5.requests import Result

SAMPLED_VALUES = 8  # of each weight, by which two models are compared


def _unpacked_text(value: Any) -> Result:
    result = of_kind(Result, value)
    if len(result.tokens) != len(result.writers):
        raise ValueError("tokens without writers")
    return result


def _packed_score(score: Score) -> Any:
    return {"error": score.error} if score.error else asdict(score)  # JSON has no NaN


def _unpacked_score(value: Any) -> Score:
    if isinstance(value, dict) and value.keys() == {"error"}:
        return Score(error=of_kind(str, value["error"]))
    return of_kind(Score, value)


def _packed_vector(vector: np.ndarray | Exception) -> Any:
    return packed_item(vector) if isinstance(vector, Exception) else [float(x) for x in vector]


def _unpacked_vector(value: Any) -> Any:
    if isinstance(value, dict):
        return unpacked_item(value)
    return np.array(of_kind(list[float], value), np.float32)


TEXTS = Codec(asdict, _unpacked_text)
SCORES = Codec(_packed_score, _unpacked_score)
VECTORS = Codec(_packed_vector, _unpacked_vector)


def model_fingerprint(model: Any) -> str:
    """A short name of a model: by the shapes of its weights and by some values of each."""
    described = []
    for name, weight in tree_flatten(model.parameters()):
        values = weight.reshape(-1)[:SAMPLED_VALUES].astype(mx.float32).tolist()
        described.append([name, list(weight.shape), str(weight.dtype), values])
    return fingerprint(described)


def common(decoder: Any, asked: Any) -> dict[str, str]:
    """What ranks have to have in common, so that it does not matter who does a prompt.

    Args:
        decoder: a `SpeculativeDecoder`, with its models.
        asked: settings, as JSON can have them.

    Returns:
        Short names, by what they stand for.
    """
    drafter = decoder.drafter
    draft = drafter.model if drafter else None
    return {
        "version of MLX": mx.__version__,
        "target model": model_fingerprint(decoder.model),
        "draft model": model_fingerprint(draft) if draft else "none",
        "set of options": fingerprint(
            [asked, decoder.defaults.num_draft, drafter and drafter.kinds]
        ),
    }
