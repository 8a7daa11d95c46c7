"""Tests the trained pair that is bundled."""

import json
import math
from pathlib import Path

import pytest

from main import DEFAULT_PROMPT
from model import load

DEMO = Path(__file__).resolve().parents[1] / "demo"


def parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as weights:
        return sum(math.prod(weights.get_slice(n).get_shape()) for n in weights.keys())


@pytest.mark.parametrize(("name", "limit"), [("target", 10_000_000), ("draft", 1_000_000)])
def test_bundled_models_are_small(name, limit):
    assert parameters(DEMO / name) <= limit
    assert sum(f.stat().st_size for f in (DEMO / name).iterdir()) <= 20_000_000
    config = json.loads((DEMO / name / "config.json").read_text())
    assert (config["pad_token_id"], config["eos_token_id"], config["d_kv"]) == (0, 1, 64)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_bundled_tokenizer_keeps_any_text(name):
    import sentencepiece

    _, tokenizer = load(DEMO / name)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(DEMO / name / "spiece.model"))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for text in ("Où est l'été ? 漢字 😀 Ω naïve <b>", DEFAULT_PROMPT, "ça \u0416"):
        ids = tokenizer(text).input_ids
        assert ids == [*reference.encode(text), 1]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
