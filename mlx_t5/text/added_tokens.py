"""What a folder's settings add to its tokenizer, read as transformers 5 reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMED = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
CLEANS = "clean_up_tokenization_spaces"
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the latter until transformers 4


@dataclass
class AddedTokens:
    """The special tokens with a name, those without one, and the added tokens by their ids.

    `cleans` says whether texts lose spaces, see `detokenizer.cleaned`.
    """

    named: dict[str, str | AddedToken] = field(default_factory=dict)
    extra: list[str | AddedToken] = field(default_factory=list)
    by_id: dict[int, AddedToken] = field(default_factory=dict)
    cleans: bool = False

    @classmethod
    def read(
        cls,
        folder: Path,
        own: Mapping[str, Any],
        special: Mapping[str, Any],
        state: Mapping[str, Any],
        default: Mapping[str, str] | None = None,
    ) -> AddedTokens | None:
        """Reads them, or returns None if the settings have what only transformers understands.

        Args:
            folder: may hold added_tokens.json.
            own: tokenizer_config.json.
            special: special_tokens_map.json; without effect if `own` lists the added tokens.
            state: tokenizer.json.
            default: named tokens, in case that neither `own` nor `special` has them.
        """
        from tokenizers import AddedToken

        listed, entries = own.get("added_tokens_decoder"), {**(default or {}), **own}
        if listed is None:
            entries |= special
        if own.get("split_special_tokens") or not _usual(entries):
            return None
        extra = _extra(own)
        named = {name: entries[name] for name in NAMED if entries.get(name) is not None}
        added = cls({n: _token(t) for n, t in named.items()}, cleans=bool(own.get(CLEANS)))
        if listed is not None:
            added.by_id = {int(i): AddedToken(**token) for i, token in listed.items()}
        else:
            known = {str(token) for token in (*added.named.values(), *map(_token, extra))}
            extra = extra or _extra(special)
            file = folder / "added_tokens.json"
            for text, i in json.loads(file.read_bytes()).items() if file.exists() else ():
                is_special = text in known
                token = AddedToken(text, normalized=not is_special, special=is_special)
                added.by_id[i] = token
            for token in state.get("added_tokens") or ():
                settings = {name: value for name, value in token.items() if name != "id"}
                added.by_id[token["id"]] = AddedToken(**settings)
        by_text = {str(token): token for token in added.by_id.values()}
        added.named = {n: by_text.get(str(t), t) for n, t in added.named.items()}
        added.extra = [*map(_token, extra)]
        return added

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds the tokens in transformers' order, on which new ids depend."""
        from tokenizers import AddedToken

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


def _extra(entries: Mapping[str, Any]) -> list:
    return next((list(entries[name]) for name in EXTRA if entries.get(name)), [])


def _usual(entries: Mapping[str, Any]) -> bool:
    """Whether all tokens are texts or objects, under the names that every tokenizer has."""
    other = [n for n, t in entries.items() if n.endswith("_token") and n not in NAMED and t]
    tokens = [entries[name] for name in NAMED if entries.get(name) is not None]
    for name in EXTRA:
        if not isinstance(entries.get(name) or [], list):
            return False
        tokens += entries.get(name) or []
    return not other and all(isinstance(t, str) or "content" in t for t in tokens)


def _token(token: Any) -> str | AddedToken:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return token
    settings = {n: v for n, v in token.items() if n not in ("__type", "special")}
    return AddedToken(**settings, special=True)
