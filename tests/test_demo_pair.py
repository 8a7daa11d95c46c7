"""Tests the trained pair that is bundled."""

from pathlib import Path

import pytest

from mlx_t5.cli.generate_options import DEFAULT_PROMPT
from mlx_t5.model import load

DEMO = Path(__file__).resolve().parents[1] / "demo"


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
