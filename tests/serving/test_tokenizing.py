"""How tokens look by themselves."""

import pytest

from byte_tokenizers import bytes_alone, pieces_and_bytes
from mlx_t5.serving.answers import TokenSpelling
from mlx_t5.text.detokenizer import decode


def test_literals():
    tokenizer = pieces_and_bytes()
    spell = TokenSpelling(tokenizer)
    for name, text, spelled in [
        ("▁cat", " cat", b" cat"),
        ("é", "é", "é".encode()),
        ("<0x41>", "A", b"A"),
        ("<0x0A>", "\n", b"\n"),
        ("<0xC3>", r"\xc3", b"\xc3"),
    ]:
        assert spell(tokenizer.convert_tokens_to_ids(name)) == (text, list(spelled))
    for name in ("</s>", "<unk>", "<extra_id_0>"):
        assert spell(tokenizer.convert_tokens_to_ids(name)) == (name, None)
    assert spell(len(tokenizer) + 5) == ("", None), "models have more ids than tokenizers"


@pytest.mark.parametrize("make", [pieces_and_bytes, bytes_alone])
@pytest.mark.parametrize("text", ["She has two cats.", " naïve é", "你好 😀 s"])
def test_the_bytes_of_all_tokens_are_the_text(make, text):
    tokenizer = make()
    spell, tokens = TokenSpelling(tokenizer), tokenizer.encode(text)
    joined = b"".join(bytes(spell(token).bytes or []) for token in tokens)
    assert joined.decode().strip() == decode(tokenizer, tokens).strip() == text.strip()
