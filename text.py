"""Between text and tokens: load a tokenizer, decode tokens, decode them as they come in.

T5's tokenizers are sentencepiece unigrams; those of mT5, umT5 and MADLAD spell what is not in
their vocabulary in byte tokens such as "<0xE4>", and ByT5 spells everything in bytes.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend import UserError
from hub import TOKENIZER_FILES
from small_files import read_small, require_small

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def load_tokenizer(folder: str | Path) -> Any:
    """The transformers tokenizer of a local folder, None if it has no tokenizer files.

    tokenizer.json is taken as it is. transformers 5 would rebuild a T5 tokenizer from the
    vocabulary alone and lose what differs from t5-small: the byte tokens, and the id of the
    unknown token, so that MADLAD would read "end of text" for an unknown character.

    Raises:
        UserError: the files are damaged, or the vocabulary is missing.
    """
    folder = Path(folder)
    files = ("tokenizer.json", "spiece.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in files):
        return None
    for file in (folder / name for name in TOKENIZER_FILES):
        if os.path.lexists(file):
            require_small(file)
    # Wanted for its tokenizers alone, transformers would tell everyone to install torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # slow to import

    try:
        kind = getattr(transformers, _class_name(folder))
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if hasattr(tokenizer, "backend_tokenizer"):
            _restore_fallback(tokenizer)
    except ImportError:  # of what transformers needs: another folder would not help
        raise
    except Exception as error:  # whatever the libraries below raise, some of it bare Exception
        reason = str(error).strip().split("\n")[0]
        message = f"{folder}: cannot load the tokenizer ({reason}): fetch it again"
        raise UserError(message) from error
    tokenizer.model_max_length = int(1e30)  # relative positions have no limit to warn about
    return tokenizer


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special tokens and without "cleaning up" any space."""
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def same_vocabulary(a: Any, b: Any) -> None:
    """Check that two tokenizers agree on all ids that both have.

    Raises:
        UserError: they do not; the message shows the first difference.
    """
    first, second = ({i: token for token, i in t.get_vocab().items()} for t in (a, b))
    common = sorted(first.keys() & second.keys())
    for i in common:
        if first[i] != second[i]:
            raise UserError(
                f"vocabularies differ: token {i} is {first[i]!r} in the target and {second[i]!r} "
                "in the draft; use a draft model with the target's tokenizer"
            )
    if not common:
        raise UserError("vocabularies differ: no token id is in both")


class StreamingDetokenizer:
    """Text of a growing list of tokens, in pieces that are final.

    Joined pieces are what `decode` makes of all tokens at once. A piece ends before a byte token
    whose character, or validity, the next token may still change.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # The last token that shows: decoded before the next ones, it keeps their leading space.
        self._context: list[int] = []
        self._pending: list[int] = []
        spelled = type(tokenizer).__name__ == "ByT5Tokenizer"
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore") if spelled else None

    def add(self, tokens: Sequence[int]) -> str:
        """Take more tokens; return the text that is now certain and has not been returned yet."""
        return "".join(self._add(int(token)) for token in tokens)

    def peek(self) -> str:
        """What `finish` would return now; more tokens may still be added."""
        return "" if self._utf8 or not self._pending else self._rest()

    def finish(self) -> str:
        """The rest, after the last token."""
        return self._utf8.decode(b"", final=True) if self._utf8 else self._flush()

    def _add(self, token: int) -> str:
        if self._utf8:
            return self._utf8.decode(self._spelling(token))
        # A single space shows only behind another token, a special or unknown token never.
        if not decode(self._tokenizer, [token, token]):
            return ""
        self._pending.append(token)
        if _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token)):
            return ""
        return self._flush()

    def _rest(self) -> str:
        known = decode(self._tokenizer, self._context)
        return decode(self._tokenizer, self._context + self._pending)[len(known) :]

    def _flush(self) -> str:
        text = self._rest()
        self._context, self._pending = self._pending[-1:] or self._context, []
        return text

    def _spelling(self, token: int) -> bytes:
        """The bytes of a ByT5 token."""
        piece = self._tokenizer.convert_ids_to_tokens([token], skip_special_tokens=True)
        if not piece:
            return b""
        return bytes([ord(piece[0])]) if len(piece[0]) == 1 else piece[0].encode()


def _class_name(folder: Path) -> str:
    """The class of transformers that loads a folder's tokenizer.

    AutoTokenizer is none of them: it would import torch wherever that is installed, which takes
    longer than all else before the first token, and does without a vocabulary that is missing.
    """
    if (folder / "tokenizer.json").is_file():
        return "PreTrainedTokenizerFast"
    if (folder / "spiece.model").is_file():
        return "T5Tokenizer"
    files = (folder / name for name in ("tokenizer_config.json", "config.json"))
    settings = (json.loads(read_small(file)) for file in files if file.is_file())
    named = (values["tokenizer_class"] for values in settings if "tokenizer_class" in values)
    if next(named, None) == "ByT5Tokenizer":
        return "ByT5Tokenizer"
    raise FileNotFoundError("neither tokenizer.json nor spiece.model is there")


def _restore_fallback(tokenizer: Any) -> None:
    """Give a sentencepiece tokenizer back the byte and unknown tokens that it may have lost."""
    unknown, spells = tokenizer.unk_token_id, "<0x00>" in tokenizer.get_vocab()
    probe = "\ue0ff"  # for private use: a character that no vocabulary has
    tokens = tokenizer.encode(probe, add_special_tokens=False)
    if decode(tokenizer, tokens) == probe if spells else unknown in tokens:
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if state["model"]["type"] != "Unigram":
        return
    state["model"].update(unk_id=unknown, byte_fallback=spells)
    if spells and "ByteFallback" not in json.dumps(state["decoder"]):
        decoders = [{"type": "ByteFallback"}, state["decoder"]]
        state["decoder"] = {"type": "Sequence", "decoders": decoders}
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
