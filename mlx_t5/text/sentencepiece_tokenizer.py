"""A transformers tokenizer that uses sentencepiece itself to cut text into pieces.

T5 models were trained on sentencepiece's pieces, so a folder's spiece.model is authoritative.
transformers 5 uses the tokenizers library instead, which is slightly different. That library
normalizes by grapheme instead of by the longest match, and reads the spelling of a byte token
("<0xE4>") in a text as that byte. It computes scores in another precision, so it may cut a text
differently if two ways of cutting have almost equal scores.

Importing transformers is slow, so import this module only to load a tokenizer.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import SentencePieceProcessor
from transformers import PreTrainedTokenizerFast

SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class SentencePieceTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a folder with spiece.model.

    Ids, pieces and decoded text follow spiece.model. The rest is as in transformers' T5 tokenizer:
    special tokens and sentinels ("<extra_id_0>") in a text become their ids, the text between two
    of them is encoded separately, and the end token comes last. Added tokens come from the
    configuration (tokenizer_config.json, special_tokens_map.json, added_tokens.json), or else from
    the list in tokenizer.json. Nothing else is read from tokenizer.json.
    """

    vocab_files_names = {"vocab_file": "spiece.model", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, extra_ids: int = 100, **kwargs: Any):
        kwargs = SPECIAL | kwargs
        kwargs.pop("tokenizer_file", None)
        self._cutter = _Cutter(vocab_file)
        sentinels = [f"<extra_id_{i}>" for i in reversed(range(extra_ids))]
        self._tokenizer = self._cutter.tokenizer(sentinels)
        # sentencepiece recognizes its own symbols in a text without ending a piece there.
        added = kwargs.get("added_tokens_decoder") or {}
        own = {i: t for i, t in added.items() if t.special or not self._cutter.has(t)}
        processor = self._cutter.processor
        ids = [i for i in range(processor.get_piece_size()) if processor.is_control(i)]
        control = processor.id_to_piece(ids)
        token = partial(tokenizers.AddedToken, special=True, normalized=False)
        special = [token(text) for text in (*control, *sentinels)]
        listed = kwargs.pop("extra_special_tokens", None) or []
        names = {str(t) for t in (*listed, *own.values(), *(kwargs[name] for name in SPECIAL))}
        kwargs["added_tokens_decoder"] = own
        kwargs["extra_special_tokens"] = [*listed, *(t for t in special if str(t) not in names)]
        super().__init__(vocab_file=vocab_file, extra_ids=extra_ids, **kwargs)
        end = (str(self.eos_token), self.eos_token_id)
        self._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=["$A", end[0]], pair=["$A", end[0], "$B", end[0]], special_tokens=[end]
        )
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(self._cutter)

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        return kwargs  # else transformers would rebuild the tokenizer

    def __getstate__(self) -> dict[str, Any]:
        # Without the pre-tokenizer, a Python object that cannot be copied.
        plain, own = tokenizers.Tokenizer(self._tokenizer.model), self._tokenizer
        plain.decoder, plain.post_processor = own.decoder, own.post_processor
        plain.encode_special_tokens = own.encode_special_tokens
        plain.add_tokens([token for _, token in sorted(own.get_added_tokens_decoder().items())])
        return {**self.__dict__, "_tokenizer": plain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(self._cutter)

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        name = f"{filename_prefix}-spiece.model" if filename_prefix else "spiece.model"
        path = Path(save_directory) / name
        if path.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, path)
        return (str(path),)

    def _save_pretrained(
        self, save_directory: str, file_names: tuple, legacy_format=None, filename_prefix=None
    ) -> tuple:
        added = Path(save_directory) / "added_tokens.json"
        added.write_text(json.dumps(self.get_added_vocab()), "utf-8")
        vocabulary = self.save_vocabulary(save_directory, filename_prefix)
        return (*file_names, str(added), *vocabulary)


class _Cutter:
    """Cuts text into pieces for `PreTokenizer.custom`, which calls `pre_tokenize`."""

    def __init__(self, file: str):
        self.processor = SentencePieceProcessor(model_file=str(file))

    def tokenizer(self, sentinels: list[str]) -> tokenizers.Tokenizer:
        size = self.processor.get_piece_size()
        pieces = self.processor.id_to_piece(list(range(size)))
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        for i, sentinel in enumerate(sentinels, size):
            vocabulary.setdefault(sentinel, i)
        unknown = pieces[self.processor.unk_id()]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
        steps = [tokenizers.decoders.Metaspace(replacement="▁", prepend_scheme="always")]
        if any(map(self.processor.is_byte, range(size))):
            steps.insert(0, tokenizers.decoders.ByteFallback())
        tokenizer.decoder = tokenizers.decoders.Sequence(steps)
        return tokenizer

    def has(self, token: str | tokenizers.AddedToken) -> bool:
        return self.processor.id_to_piece(self.processor.piece_to_id(str(token))) == str(token)

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        text.split(self._cut)

    def _cut(self, _: int, part: tokenizers.NormalizedString) -> list[tokenizers.NormalizedString]:
        pieces = self.processor.id_to_piece(self.processor.encode(str(part)))
        return [tokenizers.NormalizedString(piece) for piece in pieces]
