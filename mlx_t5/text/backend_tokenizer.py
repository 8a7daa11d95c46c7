"""The tokenizers library's tokenizer of a folder, which transformers calls the backend.

T5 models were trained on sentencepiece's pieces, so a folder's spiece.model is authoritative. The
tokenizers library, which transformers 5 uses instead, is slightly different. That library
normalizes by grapheme instead of by the longest match, and reads the spelling of a byte token
("<0xE4>") in a text as that byte. It computes scores in another precision, so it may cut a text
differently if two ways of cutting have almost equal scores.

Importing the two libraries takes time, so import this module only to load a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import (
    AddedToken,
    NormalizedString,
    PreTokenizedString,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

NAMED = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the latter until transformers 4
SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}  # T5's
MOST_SENTINELS = 10_000  # published models have up to 300; a file with more is broken


@dataclass
class AddedTokens:
    """What a folder's settings add to its tokenizer, read as transformers 5 reads them.

    Attributes:
        named: the special tokens with a name.
        extra: the special tokens without one.
        by_id: the added tokens by their ids.
    """

    named: dict[str, str | AddedToken] = field(default_factory=dict)
    extra: list[str | AddedToken] = field(default_factory=list)
    by_id: dict[int, AddedToken] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        folder: Path,
        own: Mapping[str, Any],
        special: Mapping[str, Any],
        state: Mapping[str, Any],
        default: Mapping[str, str],
    ) -> AddedTokens | None:
        """Reads them, or returns None if the settings have what only transformers understands.

        Args:
            folder: may hold added_tokens.json.
            own: tokenizer_config.json.
            special: special_tokens_map.json; without effect if `own` lists the added tokens.
            state: tokenizer.json.
            default: named tokens, in case that neither `own` nor `special` has them.
        """
        listed = own.get("added_tokens_decoder")
        entries = {**default, **own, **(special if listed is None else {})}
        named = {name: entries[name] for name in NAMED if entries.get(name) is not None}
        extra = [entries.get(name) or [] for name in EXTRA]
        other = [n for n, t in entries.items() if n.endswith("_token") and n not in NAMED and t]
        if own.get("split_special_tokens") or other or not all(isinstance(e, list) for e in extra):
            return None
        tokens = [*named.values(), *extra[0], *extra[1]]
        if not all(isinstance(token, str) or "content" in token for token in tokens):
            return None
        added = cls({name: _token(token) for name, token in named.items()})
        sources = [own] if listed is not None else [own, special]
        lists = [source[name] for source in sources for name in EXTRA if source.get(name)]
        added.extra = [_token(token) for token in lists[0]] if lists else []
        if listed is not None:
            added.by_id = {int(i): AddedToken(**token) for i, token in listed.items()}
        else:
            known = {str(token) for token in added.named.values()}
            if any(map(own.get, EXTRA)):
                known.update(map(str, added.extra))
            file = folder / "added_tokens.json"
            for text, i in json.loads(file.read_bytes()).items() if file.exists() else ():
                is_special = text in known
                added.by_id[i] = AddedToken(text, normalized=not is_special, special=is_special)
            for token in state.get("added_tokens") or ():
                settings = {name: value for name, value in token.items() if name != "id"}
                added.by_id[token["id"]] = AddedToken(**settings)
        by_text = {str(token): token for token in added.by_id.values()}
        added.named = {name: by_text.get(str(t), t) for name, t in added.named.items()}
        return added

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds the tokens in transformers' order, on which new ids depend."""
        tokens = [token for _, token in sorted(self.by_id.items())]
        known = {str(t) for t in (*tokenizer.get_added_tokens_decoder().values(), *tokens)}
        for value in (*self.named.values(), *self.extra):
            if str(value) not in known:
                tokens.append(AddedToken(value, special=True) if isinstance(value, str) else value)
                known.add(str(value))
        names = set(map(str, self.named.values()))
        for token in tokens:
            token.special = token.special or str(token) in names
        tokenizer.add_tokens(tokens)


def _token(token: Any) -> str | AddedToken:
    if isinstance(token, str):
        return token
    settings = {n: v for n, v in token.items() if n not in ("__type", "special")}
    return AddedToken(**settings, special=True)


class SentencePieceModel:
    """A spiece.model, whose ids the sentinels "<extra_id_0>" follow.

    `PreTokenizer.custom` calls `pre_tokenize`.
    """

    def __init__(self, file: str, sentinels: int):
        if type(sentinels) is not int or not 0 <= sentinels <= MOST_SENTINELS:
            raise ValueError(f"extra_ids is {sentinels!r:.40}")
        self.processor = SentencePieceProcessor(model_file=file)
        self._names = self.processor.id_to_piece(list(range(self.processor.get_piece_size())))
        self._sentinels = [f"<extra_id_{i}>" for i in reversed(range(sentinels))]

    def are_in(self, vocabulary: list | dict) -> bool:
        """Whether the vocabulary of a tokenizer.json has the same ids."""
        if isinstance(vocabulary, list):  # unigram
            return self._names == [name for name, _ in vocabulary[: len(self._names)]]
        return all(vocabulary.get(name) == i for i, name in enumerate(self._names))

    def tokenizer(self) -> Tokenizer:
        """A tokenizer with the ids and the decoder of these pieces, followed by the sentinels."""
        vocabulary = {name: i for i, name in enumerate(self._names)}
        for i, sentinel in enumerate(self._sentinels, len(self._names)):
            vocabulary.setdefault(sentinel, i)
        unknown = self._names[self.processor.unk_id()]
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
        steps: list[Any] = [decoders.Metaspace(replacement="▁", prepend_scheme="always")]
        if any(map(self.processor.is_byte, range(len(self._names)))):
            steps.insert(0, decoders.ByteFallback())
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def add_special(self, added: AddedTokens) -> None:
        """Adds the model's control tokens and the sentinels to the special tokens."""
        # sentencepiece recognizes its own symbols in a text without ending a piece there.
        own = set(self._names)
        added.by_id = {i: t for i, t in added.by_id.items() if t.special or str(t) not in own}
        control = [n for i, n in enumerate(self._names) if self.processor.is_control(i)]
        known = {str(t) for t in (*added.extra, *added.by_id.values(), *added.named.values())}
        for text in (*control, *self._sentinels):
            if text not in known:
                added.extra.append(AddedToken(text, special=True, normalized=False))

    def cut_texts_of(self, tokenizer: Tokenizer, end: str) -> None:
        """Lets sentencepiece cut the texts, and puts the end token last."""
        ending = (end, tokenizer.token_to_id(end))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[ending]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(self)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        # By ids, because sentencepiece names an unknown piece after its characters.
        ids = self.processor.encode
        text.split(lambda _, part: [NormalizedString(self._names[i]) for i in ids(str(part))])


def restore_fallback(backend: Tokenizer, unk_token: str | None, model: dict) -> None:
    """Restores what transformers 5 loses when it saves a unigram tokenizer.

    It saves id 2 for the unknown token, although token 2 may be another one: an unknown character
    in a prompt of MADLAD would be the end token. And it does not save that byte tokens spell
    unknown characters.
    """
    ids = {piece: i for i, (piece, _) in enumerate(model["vocab"])}
    spells = "<0x00>" in ids
    unknown = ids.get(unk_token or "<unk>", model.get("unk_id"))
    if (unknown, spells) != (model.get("unk_id"), model.get("byte_fallback", False)):
        vocabulary = [(piece, score) for piece, score in model["vocab"]]
        backend.model = models.Unigram(vocabulary, unk_id=unknown, byte_fallback=spells)
    if spells and "ByteFallback" not in repr(backend.decoder):
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), backend.decoder])
