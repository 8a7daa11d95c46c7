"""What the first requests would otherwise wait for: weights on disk, kernels that are not compiled.

On the page the first text is decoded with proposals and then regularly, for comparison. Without
this the first one would pay for both.
"""

from __future__ import annotations

from dataclasses import replace

from decoder import SpeculativeDecoder
from draft_length import AUTO, LONGEST
from drafters import NOTHING, Drafter, Offer
from prompts import random_keys

SOURCE = 8  # tokens of the dummy prompt


def warm_up(decoder: SpeculativeDecoder) -> None:
    """Decodes a dummy prompt, then takes a step of every width that `num_draft` leads to.

    Those are 1 to num_draft + 1 positions a pass; with "auto", 1 to `LONGEST` + 1.
    """
    filler, defaults = decoder.model.config.eos_token_id, decoder.defaults
    source = [filler] * SOURCE
    decoder.generate([source], max_tokens=8)
    longest = LONGEST if defaults.num_draft == AUTO else defaults.num_draft
    # No costs are measured for regular decoding; what is proposed is said here, step by step.
    settings = replace(defaults, num_draft=0, max_tokens=longest + 1)
    engine = decoder.engine(settings)
    engine.insert(decoder.rows(source, settings, next(random_keys(0))))
    for length in range(longest + 1 if engine.drafter else 1):
        engine.draft_and_verify([_offer(length, engine.drafter, filler)])[1].tolist()


def _offer(length: int, drafter: Drafter, filler: int) -> Offer:
    """So many proposals: of the draft model, or copied if there is none."""
    if not length:
        return NOTHING
    if drafter.model:
        return Offer("draft", length)
    return Offer("copy", length, (filler,) * length)
