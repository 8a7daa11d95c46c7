"""Loads the tokenizer of a model folder, and encodes texts.

The files of the folder decide which tokenizer is used:

    spiece.model     sentencepiece, as in training; see sentencepiece_tokenizer.py
    tokenizer.json   the tokenizer that transformers 5 loads, if there is no spiece.model.
                     transformers rebuilds T5's unigram tokenizers from the vocabulary, and loses
                     the byte tokens and the id of the unknown token: an unknown character in a
                     prompt of MADLAD would become the end token. This module restores both. Other
                     kinds of tokenizer, such as BPE, are not changed.
    neither          ByT5's tokenizer, if tokenizer_config.json or config.json names it
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mlx_t5.checkpoints.small_files import (
    CHAT_TEMPLATES,
    MORE_CHAT_TEMPLATES,
    TOKENIZER_BYTES,
    TOKENIZER_FILES,
    read_small,
    require_small,
)
from mlx_t5.errors import UserError

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MOST_SENTINELS = 10_000  # published models have up to 300; a file with more is broken or hostile
_FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json")
# Settings that would make transformers read further files, from anywhere on the disk.
_PATHS = ("fast_tokenizer_files", "gguf_file")


def load_tokenizer(folder: str | Path) -> Any:
    """Returns the transformers tokenizer of a local folder.

    Returns None if the folder has no tokenizer files and does not name ByT5's tokenizer.

    Raises:
        UserError: the files are damaged, too large or not in the folder, or no vocabulary is found.
    """
    folder = Path(folder)
    _require_own_files(folder)
    with _refusing(f"{folder}: cannot load the tokenizer", ": fetch it again"):
        names = ("config.json", _FILES[-1], "special_tokens_map.json")
        model, own, special = (_settings(folder / name) for name in names)
        if paths := [name for name in _PATHS if own.get(name) or special.get(name)]:
            raise ValueError(f"its settings name other files to read: {paths[0]}")
        named = own.get("tokenizer_class") or model.get("tokenizer_class")
        if named != "ByT5Tokenizer" and not any((folder / name).is_file() for name in _FILES):
            return None
        named = str(named or "T5Tokenizer").removesuffix("Fast")
        sentinels = own.get("extra_ids", 100 if named in ("T5Tokenizer", "MT5Tokenizer") else 0)
        if type(sentinels) is not int or not 0 <= sentinels <= _MOST_SENTINELS:
            raise ValueError(f"extra_ids is {sentinels!r:.40}")
        # transformers does not rebuild umT5's tokenizer.json, or one of a different class.
        rebuilds = named == "T5Tokenizer" and model.get("model_type", "t5") in ("t5", "mt5")
        # Without this variable, transformers would advise the user to install torch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        if (folder / "spiece.model").is_file():
            tokenizer = _from_sentencepiece(folder, sentinels)
        elif (folder / "tokenizer.json").is_file():
            names_there = own.keys() | special.keys()
            tokenizer = _from_json(folder, names_there, sentinels if rebuilds else None)
        elif named == "ByT5Tokenizer":
            from transformers import ByT5Tokenizer  # slow to import

            tokenizer = ByT5Tokenizer.from_pretrained(folder, **_LOCAL)
        else:
            raise FileNotFoundError("neither tokenizer.json nor spiece.model is there")
    tokenizer.model_max_length = int(1e30)  # relative positions have no limit, so no warnings
    return tokenizer


def _require_own_files(folder: Path) -> None:
    """Raises `UserError` if a tokenizer file is too large, or is a link out of the folder."""
    more = folder / MORE_CHAT_TEMPLATES
    templates = list(more.glob("*.jinja")) if more.is_dir() else []
    for file in (*(folder / name for name in (*TOKENIZER_FILES, *CHAT_TEMPLATES)), *templates):
        if os.path.lexists(file):
            require_small(file, root=folder)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text, the end token included.

    Raises:
        UserError: the tokenizer cannot read the text.
    """
    with _refusing("the tokenizer cannot read this prompt"):
        return tokenizer.encode(text)


@contextmanager
def _refusing(what: str, cure: str = "") -> Iterator[None]:
    """Turns a library's error in the `with` block into a `UserError`, except an `ImportError`.

    The message is `what`, then the library's reason in brackets, then `cure`. Every `Exception` is
    caught, because some libraries raise plain `Exception`. A panic in Rust is a `BaseException`
    whose class cannot be imported, so it is recognized by its name.
    """
    try:
        yield
    except (UserError, ImportError):  # a missing package is not the folder's fault
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{what} ({reason:.200}){cure}") from error


def _settings(file: Path) -> dict:
    """Returns the JSON object that a file contains; {} if the file does not exist."""
    settings = json.loads(read_small(file, TOKENIZER_BYTES)) if os.path.lexists(file) else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{file.name} holds no object")
    return settings


def _from_sentencepiece(folder: Path, sentinels: int) -> Any:
    from mlx_t5.text.sentencepiece_tokenizer import SentencePieceTokenizer  # slow to import

    # Without vocab_file, transformers prefers tokenizer.model or a path in special_tokens_map.json.
    file = str(folder / "spiece.model")
    return SentencePieceTokenizer.from_pretrained(
        folder, **_LOCAL, vocab_file=file, extra_ids=sentinels
    )


def _from_json(folder: Path, names: Set[str], sentinels: int | None) -> Any:
    # AutoTokenizer would accept a folder without a vocabulary. It would also import an installed
    # torch, which takes longer than everything else before the first token.
    from transformers import PreTrainedTokenizerFast  # slow to import

    state = _settings(folder / "tokenizer.json")
    charsmaps = _charsmaps(state.get("normalizer"))
    unigram = isinstance(state["model"]["vocab"], list)
    rebuilt = sentinels if unigram else None
    lacks = () if rebuilt is None else _SPECIAL.keys() - names
    default = {name: _SPECIAL[name] for name in lacks}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, **_LOCAL, **default, tokenizer_file=str(folder / "tokenizer.json")
    )
    if rebuilt is not None:
        _rebuild(tokenizer, charsmaps, rebuilt)
    if unigram:
        _restore_fallback(tokenizer, state["model"])
    return tokenizer


def _rebuild(tokenizer: Any, charsmaps: list[bytes], sentinels: int) -> None:
    """Gives a tokenizer the parts that transformers' T5Tokenizer has; keeps the unigram model.

    Loading a T5Tokenizer instead would be much slower.

    Args:
        tokenizer: the tokenizer to change.
        charsmaps: the character maps of the tokenizer's normalizer.
        sentinels: the number of tokens such as "<extra_id_0>".
    """
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    backend, spaces = tokenizer.backend_tokenizer, {"replacement": "▁", "prepend_scheme": "always"}
    backend.normalizer = normalizers.Precompiled(charsmaps[0]) if charsmaps else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**spaces)]
    )
    backend.decoder = decoders.Metaspace(**spaces)
    end = (str(tokenizer.eos_token), tokenizer.eos_token_id)
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end[0]], pair=["$A", end[0], "$B", end[0]], special_tokens=[end]
    )
    names = (f"<extra_id_{i}>" for i in range(sentinels))
    tokenizer.add_tokens([n for n in names if n not in tokenizer.get_vocab()], special_tokens=True)


def _restore_fallback(tokenizer: Any, model: dict) -> None:
    """Restores the byte tokens and the unknown token that a unigram tokenizer may have lost.

    The unknown token is looked up by its name, because some files that transformers has saved give
    it id 2, although token 2 is a different token.
    """
    from tokenizers import decoders, models

    backend = tokenizer.backend_tokenizer
    ids = {piece: i for i, (piece, _) in enumerate(model["vocab"])}
    unknown, spells = ids.get(tokenizer.unk_token or "<unk>", model.get("unk_id")), "<0x00>" in ids
    if (unknown, spells) != (model.get("unk_id"), model.get("byte_fallback", False)):
        vocabulary = [(piece, score) for piece, score in model["vocab"]]
        backend.model = models.Unigram(vocabulary, unk_id=unknown, byte_fallback=spells)
    if spells and "ByteFallback" not in repr(backend.decoder):
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), backend.decoder])


def _charsmaps(normalizer: dict | None) -> list[bytes]:
    """Returns the character maps of a normalizer, after a check.

    A damaged map would make the tokenizers library panic.

    Raises:
        ValueError: a map is damaged.
    """
    normalizer = normalizer or {}
    maps = [m for inner in normalizer.get("normalizers", ()) for m in _charsmaps(inner)]
    if isinstance(normalizer.get("precompiled_charsmap"), str):
        maps.append(base64.b64decode(normalizer["precompiled_charsmap"], validate=True))
        if not _sound(maps[-1]):
            raise ValueError("precompiled_charsmap is damaged")
    return maps


def _sound(charsmap: bytes) -> bool:
    """Returns whether a sentencepiece character map is sound.

    A map consists of a size in bytes (uint32), a double-array trie of that size (units of uint32,
    see https://github.com/s-yata/darts-clone), and the texts that the trie's values point to, each
    terminated by NUL.

    A map is sound if no lookup leaves its trie, and every value points to the beginning of a text.
    """
    size = int.from_bytes(charsmap[:4], "little")
    trie, texts = charsmap[4 : 4 + size], charsmap[4 + size :]
    if size % 4 or not 0 < size == len(trie) or not texts.endswith(b"\0"):
        return False
    units = np.frombuffer(trie, "<u4").astype(np.int64)
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    steps = np.flatnonzero(units >> 31 == 0)  # the other units are values
    # A step leads to its base, which holds its value, and to that base combined with a text byte.
    bases = steps ^ (units[steps] >> 10 << ((units[steps] & 1 << 9) >> 6))
    if (bases | 255).max(initial=0) >= len(units):
        return False
    values = units[bases[units[steps] >> 8 & 1 == 1]] & 0x7FFFFFFF
    starts = np.frombuffer(b"\0" + texts, np.uint8)[: len(texts)] == 0
    return bool((values < len(texts)).all() and starts[values].all())
