"""Loads the tokenizer of a model folder, and encodes texts.

Importing transformers takes longer than everything else before the first token, so the usual two
kinds of folders get a `Tokenizer`, which needs only the tokenizers library and sentencepiece.

The files of the folder decide which tokenizer is used; the first that applies is taken:

    spiece.model     sentencepiece, as in training (backend_tokenizer.py), unless the
                     tokenizer.json beside it has other tokens. Then spiece.model is a leftover of
                     the model that the tokenizer was trained from (`train_new_from_iterator`).
    tokenizer.json   the tokenizers library, with each part as it is written. transformers 5 would
                     rebuild it as a T5 tokenizer, and lose its normalizer and pre-tokenizer.
    none, but ByT5   ByT5's tokenizer, if tokenizer_config.json or config.json names it
    tokenizer.model  sentencepiece, if the class is T5's
    others           what AutoTokenizer makes of vocab.json and merges.txt, vocab.txt, …
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_t5.disk import TOKENIZER_FILES, read_object
from mlx_t5.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from mlx_t5.text.backend_tokenizer import AddedTokens, SentencePieceModel

SPIECE, JSON = "spiece.model", "tokenizer.json"
_T5_CLASSES = ("T5Tokenizer", "MT5Tokenizer")
CLEANS = "clean_up_tokenization_spaces"
_NO_LIMIT = int(1e30)  # relative positions have no limit, so transformers must not warn of one
# No code of the folder runs, and transformers finds the files in the folder: without the None, it
# would take paths from tokenizer_config.json.
_LOCAL: dict[str, Any] = {
    "local_files_only": True,
    "trust_remote_code": False,
    **dict.fromkeys(("vocab_file", "merges_file", "spm_file", "tokenizer_file")),
}


class Tokenizer:
    """The tokenizer of a folder with tokenizer.json or spiece.model, without transformers.

    It answers what decoding asks: ids, texts, pieces, the vocabulary and the names of special
    tokens. Everything else, such as `tokenizer(texts, return_tensors="np")`, is answered by
    `transformers_tokenizer`. Once that has been made, it answers everything, so that an assigned
    attribute or `add_tokens` changes all answers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        added: AddedTokens,
        make: Callable[[], Any],
        cleans: bool = False,
    ) -> None:
        """Wraps a tokenizer with added tokens.

        Args:
            backend: answers until `make` is called.
            added: the tokens that have been added to it.
            make: returns transformers' tokenizer of the folder.
            cleans: whether texts lose spaces, see `detokenizer.cleaned`.
        """
        names: dict[str, Any] = {name: str(token) for name, token in added.named.items()}
        special = list(dict.fromkeys([*names.values(), *map(str, added.extra)]))
        names |= {f"{name}_id": backend.token_to_id(token) for name, token in names.items()}
        names |= {"all_special_tokens": special, CLEANS: cleans}
        names |= {"added_tokens_decoder": backend.get_added_tokens_decoder()}
        names |= {"all_special_ids": [backend.token_to_id(token) for token in special]}
        # Not by assignment, which changes transformers' tokenizer.
        self.__dict__.update(_tokenizer=backend, _names=names, _make=make, _made=None)

    @property
    def transformers_tokenizer(self) -> Any:
        """transformers' tokenizer of the same folder, made when it is first needed."""
        if self._made is None:
            made = self._make()
            self.__dict__.update(_made=made, _tokenizer=made.backend_tokenizer, _names={})
        return self._made

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        if self._made is None and isinstance(text, str) and not args and not options:
            return self._tokenizer.encode(text).ids
        return self.transformers_tokenizer.encode(text, *args, **options)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        plain = options == {CLEANS: False} or (not options and not self._names.get(CLEANS))
        if self._made is None and plain and isinstance(ids, list):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        options["skip_special_tokens"] = skip_special_tokens
        return self.transformers_tokenizer.decode(ids, **options)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if self._made is None and isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return self.transformers_tokenizer.convert_ids_to_tokens(ids, skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.transformers_tokenizer(*args, **options)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens)"

    def __contains__(self, token: Any) -> bool:
        return token in self.transformers_tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of copy, pickle and numpy look for these
            raise AttributeError(name)
        if name in self._names:
            return self._names[name]
        return getattr(self.transformers_tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A method that calls the one it replaces would call itself if it were transformers'.
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.transformers_tokenizer, name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(type(self), name):
            object.__delattr__(self, name)
        else:
            delattr(self.transformers_tokenizer, name)

    def __deepcopy__(self, memo: dict) -> Tokenizer:
        if self._made is not None:
            return _around(copy.deepcopy(self._made, memo))
        twin = Tokenizer.__new__(Tokenizer)  # nothing that both share can change
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce__(self) -> tuple:
        return _around, (self.transformers_tokenizer,)


def _around(made: Any) -> Tokenizer:
    """A `Tokenizer` whose answers are those of a transformers tokenizer."""
    from mlx_t5.text.backend_tokenizer import AddedTokens

    tokenizer = Tokenizer(made.backend_tokenizer, AddedTokens(), lambda: made)
    assert tokenizer.transformers_tokenizer is made
    return tokenizer


def load_tokenizer(folder: str | Path) -> Any:
    """A folder's `Tokenizer`, or transformers' own; None if the folder has no files for one."""
    folder = Path(folder)
    with _refusing(f"{folder}: cannot load the tokenizer", ": fetch it again"):
        names = ("config.json", "tokenizer_config.json", "special_tokens_map.json", JSON)
        model, own, special, state = (read_object(folder / name, default={}) for name in names)
        named = own.get("tokenizer_class") or model.get("tokenizer_class") or _T5_CLASSES[0]
        named = str(named).removesuffix("Fast")
        is_byt5 = named == "ByT5Tokenizer"
        if not is_byt5 and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        paths = [name for name in ("fast_tokenizer_files", "gguf_file") if own.get(name)]
        paths += [name for name in special if name.endswith(("_file", "_files"))]
        if paths:
            raise ValueError(f"its settings name other files to read: {paths[0]}")
        # Without this variable, transformers would advise the user to install torch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        is_t5 = named in _T5_CLASSES
        spiece = folder / SPIECE
        if not spiece.is_file() and not state and is_t5:
            spiece = folder / "tokenizer.model"
        if spiece.is_file():
            from mlx_t5.text.backend_tokenizer import SentencePieceModel  # slow to import

            sentinels = own.get("extra_ids", 100 if is_t5 else 0)
            sp_model = SentencePieceModel(str(spiece), sentinels)
            if not state or sp_model.are_in(state["model"]["vocab"]):
                return _from_sentencepiece(sp_model, spiece, sentinels, own, special, state)
        if state:
            return _from_json(folder, own, special, state)
        if is_byt5:
            from transformers import ByT5Tokenizer  # slow to import

            tokenizer = ByT5Tokenizer.from_pretrained(folder, **_LOCAL)
        else:
            tokenizer = _from_vocabulary(folder, named)
    tokenizer.model_max_length = _NO_LIMIT
    return tokenizer


def save_tokenizer(tokenizer: Any, source: Path, folder: Path) -> None:
    """Writes tokenizer.json for a tokenizer of other files; the files of a `Tokenizer` suffice."""
    # The class comes first: asked for `is_fast`, a `Tokenizer` would import transformers.
    if not isinstance(tokenizer, Tokenizer) and getattr(tokenizer, "is_fast", False):
        tokenizer.backend_tokenizer.save(str(folder / JSON))
        # The names of special tokens are in the class, or were read from other files.
        own = read_object(source / "tokenizer_config.json", default={})
        own |= tokenizer.special_tokens_map
        (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=2), "utf-8")


def same_vocabulary(of_target: Any, of_draft: Any) -> None:
    """Checks that two tokenizers agree; None is a missing one, and agrees."""
    if of_target is None or of_draft is None:
        return
    tokens = {i: token for token, i in of_target.get_vocab().items()}
    for token, i in sorted(of_draft.get_vocab().items(), key=lambda entry: entry[1]):
        if tokens.get(i, token) != token:
            words = f"{tokens[i]!r} in the target and {token!r} in the draft"
            cure = "use a draft model with the target's tokenizer"
            raise UserError(f"vocabularies differ: token {i} is {words}; {cure}")


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


def _from_sentencepiece(
    sp_model: SentencePieceModel, file: Path, sentinels: int, own: dict, special: dict, state: dict
) -> Any:
    from mlx_t5.text.backend_tokenizer import SPECIAL, AddedTokens

    def make() -> Any:
        from mlx_t5.text.sentencepiece_tokenizer import SentencePieceTokenizer  # slow to import

        files = _LOCAL | {"vocab_file": str(file)}
        made = SentencePieceTokenizer.from_pretrained(file.parent, **files, extra_ids=sentinels)
        made.model_max_length = _NO_LIMIT
        return made

    added = AddedTokens.read(file.parent, own, special, state, SPECIAL)
    if added is None:
        return make()
    sp_model.add_special(added)
    backend = sp_model.tokenizer()
    added.add_to(backend)
    sp_model.cut_texts_of(backend, str(added.named["eos_token"]))
    return Tokenizer(backend, added, make, bool(own.get(CLEANS)))


def _from_json(folder: Path, own: dict, special: dict, state: dict) -> Any:
    import tokenizers

    from mlx_t5.text.backend_tokenizer import SPECIAL, AddedTokens, restore_fallback

    contents = [token["content"] for token in state.get("added_tokens") or ()]
    names = own.keys() | special.keys()
    default = {n: t for n, t in SPECIAL.items() if n not in names and t in contents}
    unigram = state["model"] if isinstance(state["model"]["vocab"], list) else None

    def make() -> Any:
        # AutoTokenizer would also import an installed torch.
        from transformers import PreTrainedTokenizerFast  # slow to import

        files = _LOCAL | {"tokenizer_file": str(folder / JSON)}
        made = PreTrainedTokenizerFast.from_pretrained(folder, **files, **default)
        if unigram:
            restore_fallback(made.backend_tokenizer, made.unk_token, unigram)
        made.model_max_length = _NO_LIMIT
        return made

    added = AddedTokens.read(folder, own, special, state, default)
    if added is None:
        return make()
    backend = tokenizers.Tokenizer.from_file(str(folder / JSON))
    backend.no_truncation()
    backend.no_padding()
    added.add_to(backend)
    if unigram:
        restore_fallback(backend, str(added.named.get("unk_token", "<unk>")), unigram)
    return Tokenizer(backend, added, make, bool(own.get(CLEANS)))


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
