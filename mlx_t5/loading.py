"""Finds a target and its draft by the names that the user gives (names.py), and loads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx_t5.checkpoints.adapter_config import adapter_folder
from mlx_t5.checkpoints.default_drafts import default_draft
from mlx_t5.checkpoints.hub import is_cached
from mlx_t5.checkpoints.small_files import snapshot_id
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.proposals import Drafter
from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy
from mlx_t5.errors import UserError, log
from mlx_t5.names import (
    ADAPTED,
    AUTO,
    BUNDLED,
    CONVERTED,
    LOOKUP,
    NONE,
    Convert,
    folder_of,
    locate,
    require_same,
    source_of,
)
from mlx_t5.network.config import T5Config
from mlx_t5.network.memory import dtype_hint, warning
from mlx_t5.network.weights import read_config
from model import T5, load

DEFAULT_TARGET, DEFAULT_DRAFT = "t5-11b", "t5-small"
OTHERWISE = "lookup copies from the prompt, distill.py makes a draft"


@dataclass(frozen=True)
class ModelPair:
    """The folders of a target and its draft.

    Attributes:
        target: folder of the model that writes the text.
        draft: folder of the model that proposes tokens, or None.
        lookup: whether proposals are also copied from the source.
        note: one line that tells the user which models run and, if there is a reason, why.
        adapter: folder of a LoRA adapter to merge into the target, or None.
    """

    target: Path
    draft: Path | None
    lookup: bool
    note: str
    adapter: Path | None = None


def choose_pair(
    model: str | None,
    draft_model: str | None,
    convert: Convert | None,
    regular: bool = False,
    adapter: str | Path | None = None,
    regular_because: str = "regular decoding",
    fetch: bool = False,
    revision: str | None = None,
) -> ModelPair:
    """Returns the models to run; converts them if necessary.

    Args:
        model: name of the target. If None: t5-11b with t5-small if both have been converted,
            otherwise the bundled pair.
        draft_model: name of the draft; "lookup" to copy from the source instead, "NAME+lookup" to
            use a draft and copy, "none" for no draft. If None or "auto": the target's default
            draft, if it is available.
        convert: see `locate`.
        regular: whether to use no draft, whatever `draft_model` is.
        adapter: folder of a LoRA adapter to merge into the target.
        regular_because: the reason for decoding without a draft, shown to the user.
        fetch: whether a default draft that is not in `models/` may be taken from Hugging Face's
            cache, or else downloaded. If `convert` is given and the target's folder existed before
            this call, only the cache is used, because the user expects no download.
        revision: revision of the target, see `locate`.

    Raises:
        UserError: a model does not exist or cannot be converted.
    """
    draft: Path | None = None
    merged = None if adapter is None else adapter_folder(adapter)  # before anything is converted
    why, is_new = "", model is not None and not folder_of(model).is_dir()
    if model is None:
        target, draft, why = _default_pair()
    else:
        target = locate(model, convert, revision)
    lookup = not regular and draft_model is not None and draft_model.split("+")[-1] == LOOKUP
    if regular or draft_model == NONE:
        draft, why = None, f"{why}{regular_because}"
    elif draft_model == LOOKUP:
        draft = None
    elif draft_model not in (None, AUTO):
        draft = locate(draft_model.removesuffix(f"+{LOOKUP}"), convert)
    elif model is not None:
        draft, why = _default_draft(target, convert, fetch, is_new)
    names = f"target {_shown(target)}" + (f" with {_shown(merged)}" if merged else "")
    names += f", draft {_shown(draft)}" if draft else ""
    names += ", copying from the source" if lookup else ""
    note = f"{names} ({why.removesuffix('; ')})" if why else names
    return ModelPair(target, draft, lookup, note, merged)


class LoadedPair(NamedTuple):
    """A target and its drafter.

    Attributes:
        target: the model that writes the text.
        drafter: proposes tokens; None for regular decoding.
        tokenizer: the target's tokenizer, None if its folder has none.
        draft_tokenizer: the draft's tokenizer, None if it has none or there is no draft.
    """

    target: T5
    drafter: Drafter | None
    tokenizer: Any
    draft_tokenizer: Any


def load_pair(chosen: ModelPair, dtype: str | None) -> LoadedPair:
    """Loads a pair's models; warns on standard error if they barely fit into memory.

    Args:
        chosen: the folders of the models.
        dtype: type to compute in, as in `model.load`.

    Raises:
        UserError: a model cannot be read, or the draft does not fit the target.
    """
    _advise(chosen, dtype)
    target, tokenizer = load(chosen.target, dtype, chosen.adapter)
    drafter: Drafter | None = None
    draft_tokenizer = None
    if chosen.draft:
        draft, draft_tokenizer = load(chosen.draft, dtype, shared_with=target)
        drafter = DraftModel(draft, target)
    if chosen.lookup:
        copy = SourceCopy(tokenizer)
        drafter = CopyOrDraft(copy, drafter) if drafter else copy
    return LoadedPair(target, drafter, tokenizer, draft_tokenizer)


def _advise(chosen: ModelPair, dtype: str | None) -> None:
    """Warns on standard error if models barely fit into memory, or use float32 by default."""
    folders = [folder for folder in (chosen.target, chosen.draft) if folder]
    with contextlib.suppress(UserError):  # if a folder is damaged, loading it reports that
        for folder in folders:
            if hint := dtype_hint(folder, dtype):
                log(f"hint: {hint}")
        if large := warning(folders, dtype):
            log(f"warning: {large}")


def _default_pair() -> tuple[Path, Path, str]:
    pair = CONVERTED / DEFAULT_TARGET, CONVERTED / DEFAULT_DRAFT
    if all(folder.is_dir() for folder in pair):
        for folder in pair:
            require_same(folder.name, folder)
        return *pair, ""
    missing = " and ".join(str(folder) for folder in pair if not folder.is_dir())
    return BUNDLED / "target", BUNDLED / "draft", f"the bundled pair: no {missing}; "


def _default_draft(
    target: Path, convert: Convert | None, fetch: bool, is_new: bool
) -> tuple[Path | None, str]:
    """Returns the folder of a target's default draft, or None, and a note for the user.

    Args:
        target: the target's folder.
        convert: see `locate`.
        fetch: whether a draft that is not in `models/` may be taken from Hugging Face's cache, or
            else downloaded. If `convert` is given, a download also requires `is_new`.
        is_new: whether the target had no folder before this run.
    """
    if target.resolve() == (BUNDLED / "target").resolve():
        return BUNDLED / "draft", ""
    name = default_draft((source_of(target) or target.name).partition(ADAPTED)[0])
    if name is None:
        return None, f"no draft named and no default for it: regular decoding; {OTHERWISE}"
    folder = CONVERTED / name.rsplit("/", 1)[-1]
    if not folder.is_dir() and fetch and (convert is None or is_new or is_cached(name)):
        if convert:
            log(f"its default draft is {name}; --draft-model none does without")
        try:
            folder = locate(name, convert)
        except UserError as error:
            return None, f"regular decoding: no default draft, as {error}"
    if not folder.is_dir():
        cure = f"python convert.py --model {name}"
        return None, f"regular decoding: its default draft is not there; get it with: {cure}"
    if source_of(folder) not in (None, name) or not _fit(target, folder):
        return None, f"regular decoding: {folder} is not its default draft, {name}"
    return folder, "its default draft"


def _fit(target: Path, draft: Path) -> bool:
    """Returns whether target and draft have vocabularies of equal size, and equal special tokens.

    Returns True if a config is damaged, because loading reports the damage.
    """
    try:
        configs = [T5Config.from_dict(read_config(folder)) for folder in (target, draft)]
    except UserError:
        return True  # loading reports the damage
    names = ("vocab_size", "eos_token_ids", "decoder_start_token_id")
    return len({tuple(getattr(config, name) for name in names) for config in configs}) == 1


def _shown(folder: Path) -> str:
    """Returns a short name of a folder: its Hub id, or its path from the working directory."""
    if hub_id := snapshot_id(folder):
        return hub_id
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
