"""Loads the tokenizer of a model folder, and encodes texts.

The files of the folder decide which tokenizer is used; the first that applies is taken:

    spiece.model     sentencepiece, as in training (sentencepiece_tokenizer.py), unless the
                     tokenizer.json beside it has other tokens. Then spiece.model is a leftover of
                     the model that the tokenizer was trained from (`train_new_from_iterator`).
    tokenizer.json   the tokenizers library, with each part as it is written. transformers 5 would
                     rebuild it as a T5 tokenizer, and lose its normalizer and pre-tokenizer.
    none, but ByT5   ByT5's tokenizer, if tokenizer_config.json or config.json names it
    tokenizer.model  sentencepiece, if the class is T5's
    others           what AutoTokenizer makes of vocab.json and merges.txt, vocab.txt, …
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_t5.disk import TOKENIZER_FILES
from mlx_t5.errors import UserError

SPIECE, JSON = "spiece.model", "tokenizer.json"
_T5_CLASSES = ("T5Tokenizer", "MT5Tokenizer")
_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MOST_SENTINELS = 10_000  # published models have up to 300; a file with more is broken
# No code of the folder runs, and transformers finds the files in the folder: without the None, it
# would take paths from tokenizer_config.json.
_LOCAL: dict[str, Any] = {
    "local_files_only": True,
    "trust_remote_code": False,
    **dict.fromkeys(("vocab_file", "merges_file", "spm_file", "tokenizer_file")),
}


def load_tokenizer(folder: str | Path) -> Any:
    """The transformers tokenizer of a folder; None if it has no files for one."""
    folder = Path(folder)
    with _refusing(f"{folder}: cannot load the tokenizer", ": fetch it again"):
        names = ("config.json", "tokenizer_config.json", "special_tokens_map.json", JSON)
        model, own, special, state = (_read(folder / name) for name in names)
        named = own.get("tokenizer_class") or model.get("tokenizer_class") or _T5_CLASSES[0]
        named = str(named).removesuffix("Fast")
        is_byt5 = named == "ByT5Tokenizer"
        if not is_byt5 and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        paths = [name for name in ("fast_tokenizer_files", "gguf_file") if own.get(name)]
        if paths := paths + [name for name in special if name.endswith(("_file", "_files"))]:
            raise ValueError(f"its settings name other files to read: {paths[0]}")
        # Without this variable, transformers would advise the user to install torch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        if (folder / SPIECE).is_file() and (not state or _same_tokens(folder / SPIECE, state)):
            tokenizer = _from_sentencepiece(folder / SPIECE, named, own)
        elif state:
            tokenizer = _from_json(folder, state, own.keys() | special.keys())
        elif is_byt5:
            from transformers import ByT5Tokenizer  # slow to import

            tokenizer = ByT5Tokenizer.from_pretrained(folder, **_LOCAL)
        elif named in _T5_CLASSES and (folder / "tokenizer.model").is_file():
            tokenizer = _from_sentencepiece(folder / "tokenizer.model", named, own)
        else:
            tokenizer = _from_vocabulary(folder, named)
    tokenizer.model_max_length = int(1e30)  # relative positions have no limit, so no warnings
    return tokenizer


def save_tokenizer(tokenizer: Any, source: Path, folder: Path) -> None:
    from mlx_t5.text.sentencepiece_tokenizer import SentencePieceTokenizer  # slow to import

    is_own = isinstance(tokenizer, SentencePieceTokenizer) or (source / JSON).is_file()
    if getattr(tokenizer, "is_fast", False) and not is_own:
        tokenizer.backend_tokenizer.save(str(folder / JSON))
        # The names of special tokens are in the class, or were read from other files.
        own = _read(source / "tokenizer_config.json") | tokenizer.special_tokens_map
        (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=2), "utf-8")


def encode(tokenizer: Any, text: str) -> list[int]:
    with _refusing("the tokenizer cannot read this prompt"):
        return tokenizer.encode(text)


@contextmanager
def _refusing(what: str, cure: str = "") -> Iterator[None]:
    try:
        yield
    except (UserError, ImportError):  # a missing package is not the folder's fault
        raise
    except BaseException as error:
        # A panic in Rust is a BaseException whose class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{what} ({reason:.200}){cure}") from error


def _read(file: Path) -> dict:
    value = json.loads(file.read_bytes()) if file.exists() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} holds no object")
    return value


def _same_tokens(spiece: Path, state: dict) -> bool:
    from sentencepiece import SentencePieceProcessor

    processor, vocabulary = SentencePieceProcessor(model_file=str(spiece)), state["model"]["vocab"]
    pieces = processor.id_to_piece(list(range(processor.get_piece_size())))
    if isinstance(vocabulary, list):  # unigram
        return pieces == [piece for piece, _ in vocabulary[: len(pieces)]]
    return all(vocabulary.get(piece) == i for i, piece in enumerate(pieces))


def _from_sentencepiece(file: Path, named: str, own: dict) -> Any:
    from mlx_t5.text.sentencepiece_tokenizer import SentencePieceTokenizer  # slow to import

    sentinels = own.get("extra_ids", 100 if named in _T5_CLASSES else 0)
    if type(sentinels) is not int or not 0 <= sentinels <= _MOST_SENTINELS:
        raise ValueError(f"extra_ids is {sentinels!r:.40}")
    files = _LOCAL | {"vocab_file": str(file)}
    return SentencePieceTokenizer.from_pretrained(file.parent, **files, extra_ids=sentinels)


def _from_json(folder: Path, state: dict, names: Set[str]) -> Any:
    # AutoTokenizer would also import an installed torch, which takes longer than everything else
    # before the first token.
    from transformers import PreTrainedTokenizerFast  # slow to import

    added = [token["content"] for token in state.get("added_tokens") or ()]
    default = {name: t for name, t in _SPECIAL.items() if name not in names and t in added}
    files = _LOCAL | {"tokenizer_file": str(folder / JSON)}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **files, **default)
    if isinstance(state["model"]["vocab"], list):  # unigram
        _restore_fallback(tokenizer, state["model"])
    return tokenizer


def _restore_fallback(tokenizer: Any, model: dict) -> None:
    """Restores what transformers 5 loses when it saves a unigram tokenizer.

    It saves id 2 for the unknown token, although token 2 may be another one: an unknown character
    in a prompt of MADLAD would be the end token. And it does not save that byte tokens spell
    unknown characters.
    """
    from tokenizers import decoders, models

    backend, ids = tokenizer.backend_tokenizer, {p: i for i, (p, _) in enumerate(model["vocab"])}
    spells = "<0x00>" in ids
    unknown = ids.get(tokenizer.unk_token or "<unk>", model.get("unk_id"))
    if (unknown, spells) != (model.get("unk_id"), model.get("byte_fallback", False)):
        vocabulary = [(piece, score) for piece, score in model["vocab"]]
        backend.model = models.Unigram(vocabulary, unk_id=unknown, byte_fallback=spells)
    if spells and "ByteFallback" not in repr(backend.decoder):
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), backend.decoder])


def _from_vocabulary(folder: Path, named: str) -> Any:
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    names = [name for name in tokenizer.vocab_files_names.values() if name]
    # Without any, T5Tokenizer invents a vocabulary of special tokens.
    if not any((folder / name).is_file() for name in (*names, "tokenizer.model")):
        needed = f"{named} reads {' or '.join(names)}, which is not there"
        cure = "add it, or name another tokenizer_class in tokenizer_config.json"
        raise UserError(f"{folder}: cannot load the tokenizer, as {needed}; {cure}")
    return tokenizer
