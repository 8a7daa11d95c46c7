"""A transformers tokenizer that uses sentencepiece itself to cut text into pieces.

See backend_tokenizer.py for the reason. Importing transformers is slow, so import this module only
to load a tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_t5.text.backend_tokenizer import EXTRA, SPECIAL, AddedTokens, SentencePieceModel


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
        self._sp_model = SentencePieceModel(vocab_file, extra_ids)
        self._tokenizer = self._sp_model.tokenizer()
        added = AddedTokens(
            {name: kwargs[name] for name in SPECIAL},
            next((list(kwargs.pop(name)) for name in EXTRA if kwargs.get(name)), []),
            kwargs.get("added_tokens_decoder") or {},
        )
        self._sp_model.add_special(added)
        kwargs |= {"added_tokens_decoder": added.by_id, "extra_special_tokens": added.extra}
        super().__init__(vocab_file=vocab_file, extra_ids=extra_ids, **kwargs)
        self._sp_model.cut_texts_of(self._tokenizer, str(self.eos_token))

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        return kwargs  # else transformers would rebuild the tokenizer

    def __getstate__(self) -> dict[str, Any]:
        # Without the pre-tokenizer, a Python object that cannot be copied.
        plain, own = tokenizers.Tokenizer(self._tokenizer.model), self._tokenizer
        plain.decoder = own.decoder
        plain.encode_special_tokens = own.encode_special_tokens
        plain.add_tokens([token for _, token in sorted(own.get_added_tokens_decoder().items())])
        return {**self.__dict__, "_tokenizer": plain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sp_model.cut_texts_of(self._tokenizer, str(self.eos_token))

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
