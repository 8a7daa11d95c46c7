"""The two words by which a served model says whether a document is relevant."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_t5.checkpoints.hub import source_of
from mlx_t5.scoring.pairs import TRUE

# The answers for relevant and for irrelevant documents by the names of models, as in rerankers 0.10
# (models/t5ranker.py); other models answer "true" and "false". mT5 has no token for "false", so the
# first token of its spelling counts.
WORDS_BY_NAME = {
    r"mt5-(?:3b|13b)-mmarco": (TRUE, "▁"),
    r"mt5-base-[\w-]*marco": ("yes", "no"),
    r"monoptt5": ("Sim", "Não"),
    r"ptt5-base-[\w-]*marco": ("sim", "não"),
}


def named_words(folder: Path) -> tuple[str, str] | None:
    """The words of the published model that a folder's name, origin or model card names."""
    card = [file.read_text("utf-8", "replace") for file in folder.glob("README.md")]
    names = "\n".join([folder.resolve().name, source_of(folder) or "", *card])
    by_position: dict[int, tuple[str, str]] = {}
    for pattern, words in WORDS_BY_NAME.items():
        match = re.search(pattern, names, re.IGNORECASE)
        if match:
            by_position[match.start()] = words
    return by_position[min(by_position)] if by_position else None  # a card names others, too
