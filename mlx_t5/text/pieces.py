"""Texts cut into pieces by sentencepiece, behind the interface of the tokenizers library.

T5 models were trained on sentencepiece's pieces, so a folder's spiece.model is authoritative. The
tokenizers library, which transformers 5 uses instead, is slightly different. That library
normalizes by grapheme instead of by the longest match, and reads the spelling of a byte token
("<0xE4>") in a text as that byte. It computes scores in another precision, so it may cut a text
differently if two ways of cutting have almost equal scores.
"""

from __future__ import annotations

from functools import partial

import tokenizers
from sentencepiece import SentencePieceProcessor

from mlx_t5.text.added_tokens import AddedTokens

_special_token = partial(tokenizers.AddedToken, special=True, normalized=False)


class Pieces:
    """A spiece.model. `PreTokenizer.custom` calls its `pre_tokenize`."""

    def __init__(self, file: str):
        self.processor = SentencePieceProcessor(model_file=file)

    def tokenizer(self, sentinels: int) -> tokenizers.Tokenizer:
        """A tokenizer with the ids and the decoder of these pieces, followed by the sentinels."""
        size = self.processor.get_piece_size()
        pieces = self.processor.id_to_piece(list(range(size)))
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        for i, sentinel in enumerate(sentinel_names(sentinels), size):
            vocabulary.setdefault(sentinel, i)
        unknown = pieces[self.processor.unk_id()]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
        steps = [tokenizers.decoders.Metaspace(replacement="▁", prepend_scheme="always")]
        if any(map(self.processor.is_byte, range(size))):
            steps.insert(0, tokenizers.decoders.ByteFallback())
        tokenizer.decoder = tokenizers.decoders.Sequence(steps)
        return tokenizer

    def add_special(self, added: AddedTokens, sentinels: int) -> None:
        """Adds the model's control tokens and the sentinels to the special tokens."""
        # sentencepiece recognizes its own symbols in a text without ending a piece there.
        added.by_id = {i: t for i, t in added.by_id.items() if t.special or not self._has(t)}
        ids = range(self.processor.get_piece_size())
        control = self.processor.id_to_piece([i for i in ids if self.processor.is_control(i)])
        known = {str(t) for t in (*added.extra, *added.by_id.values(), *added.named.values())}
        texts = [text for text in (*control, *sentinel_names(sentinels)) if text not in known]
        added.extra += map(_special_token, texts)

    def cut_texts_of(self, tokenizer: tokenizers.Tokenizer, end: str) -> None:
        """Lets sentencepiece cut the texts, and puts the end token last."""
        ending = (end, tokenizer.token_to_id(end))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[ending]
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(self)

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        text.split(self._cut)

    def _has(self, token: str | tokenizers.AddedToken) -> bool:
        return self.processor.id_to_piece(self.processor.piece_to_id(str(token))) == str(token)

    def _cut(self, _: int, part: tokenizers.NormalizedString) -> list[tokenizers.NormalizedString]:
        pieces = self.processor.id_to_piece(self.processor.encode(str(part)))
        return [tokenizers.NormalizedString(piece) for piece in pieces]


def sentinel_names(count: int) -> list[str]:
    return [f"<extra_id_{i}>" for i in reversed(range(count))]
