"""Tokenizers with few tokens: words, pieces and single bytes."""

import tokenizers
import transformers

PIECES = ["▁", "▁She", "▁has", "s", "▁two", "▁cat", ".", "é", "▁naïve"]
SPECIAL = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]


def pieces_and_bytes():
    """Returns a unigram tokenizer that spells unknown text in bytes, as mT5's does."""
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    model = tokenizers.models.Unigram([(name, 0.0) for name in names], 2, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()]
    tokenizer.decoder = tokenizers.decoders.Sequence(parts)
    named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    more = {"additional_special_tokens": SPECIAL[3:]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **more)


class Words:
    """A tokenizer whose tokens are the given words; a text is their concatenation."""

    def __init__(self, words):
        self.words = words

    def encode(self, text):
        return [self.words.index(character) for character in text]

    def decode(self, tokens, **_):
        return "".join(self.words[token] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.words[token]

    def get_vocab(self):
        return {f"{i}{word}": i for i, word in enumerate(self.words)}


def bytes_alone():
    """Returns ByT5's tokenizer."""
    return transformers.ByT5Tokenizer()
