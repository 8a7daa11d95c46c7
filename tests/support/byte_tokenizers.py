"""Tokenizers of a few tokens, some of which are single bytes."""

import tokenizers
import transformers

PIECES = ["▁", "▁She", "▁has", "s", "▁two", "▁cat", ".", "é", "▁naïve"]
SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]


def pieces_and_bytes():
    """A unigram tokenizer that spells what it does not know in bytes, as mT5's does."""
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    model = tokenizers.models.Unigram([(name, 0.0) for name in names], 2, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()]
    tokenizer.decoder = tokenizers.decoders.Sequence(parts)
    named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    more = {"additional_special_tokens": SPECIAL[3:]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **more)


def bytes_alone():
    """ByT5's."""
    return transformers.ByT5Tokenizer()
