"""A random T5 whose tokenizer has the words of monoT5."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints

PIECES = ["<pad>", "</s>", "<unk>", "▁true", "▁false", "▁", ":", "."]
PIECES += "abcdefghijklmnopqrstuvwxyzQDR"


def save(folder: Path, **entries) -> Path:
    """Writes the folder of the model; `entries` are added to config.json."""
    config = {**checkpoints.TINY, **entries}
    state = {n: 3 * (t - 0.5) for n, t in checkpoints.random_state(config).items()}
    checkpoints.save(state, folder, config=config)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": [[piece, -3.0] for piece in PIECES]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
