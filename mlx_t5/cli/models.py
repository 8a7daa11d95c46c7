"""Which target and which draft to run: from the names a user gives (mlx_t5/names.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.cli.arguments import LOOKUP, log
from mlx_t5.errors import UserError
from mlx_t5.names import ADAPTED, CONVERTED, Convert, folder_of, locate, require_same, source_of

BUNDLED = Path(__file__).parents[2] / "demo"
DEFAULT_TARGET, DEFAULT_DRAFT = "t5-11b", "t5-small"
AUTO, NONE = "auto", "none"  # as the name of a draft
OTHERWISE = "lookup copies from the prompt, distill.py makes a draft"


@dataclass(frozen=True)
class Pair:
    """Two model folders; without a draft the target decodes alone.

    Attributes:
        target: folder of the model whose output is decoded.
        draft: folder of the model that proposes, or None.
        lookup: whether proposals are also copied from the source.
        note: one line that tells the user what was chosen, and why when they did not say.
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
) -> Pair:
    """Finds the models to run, and converts them if need be.

    Args:
        model: name of the target; None takes t5-11b where it and t5-small are converted, and the
            bundled pair otherwise.
        draft_model: name of the draft; "lookup" to copy from the source instead, "NAME+lookup" to
            do both, "none" to do without. None and "auto" take the target's default draft, if it
            has one and that is there.
        convert: see `locate`.
        regular: do without a draft, whatever `draft_model` says.
        adapter: folder of a LoRA adapter to merge into the target.
        regular_because: what the user is told then.
        fetch: whether a default draft may be taken from Hugging Face's cache, or from the Hub if
            the target is new here as well or nothing is converted.
        revision: of the target, see `locate`.

    Raises:
        UserError: there is no such model, or it cannot be converted.
    """
    from mlx_t5.checkpoints.adapter_config import adapter_folder

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
        may = fetch and "MLX_RANK" not in os.environ  # several ranks would all convert it
        draft, why = _default_draft(target, convert, may, is_new)
    names = f"target {_shown(target)}" + (f" with {_shown(merged)}" if merged else "")
    names += f", draft {_shown(draft)}" if draft else ""
    names += ", copying from the source" if lookup else ""
    note = f"{names} ({why.removesuffix('; ')})" if why else names
    return Pair(target, draft, lookup, note, merged)


def load_named(
    load: Callable, model: Any, draft: Any, revision: str | None, dtype: Any, adapter: Any
) -> tuple[Any, Any, Any, Any]:
    """Loads a pair by its names; says on standard error, in one line, what was taken.

    Args:
        load: `model.load`.
        model: name of the target.
        draft: its name, as of `choose_pair`; None is none.
        revision: branch, tag or commit of the target, if that is a Hub id.
        dtype: compute in this type; None keeps the folders'.
        adapter: folder of a LoRA adapter to merge into the target.

    Returns:
        As `load_pair`.

    Raises:
        UserError: a model cannot be had or read, or the two do not fit each other.
    """
    names = str(model), NONE if draft is None else str(draft)
    chosen = choose_pair(*names, None, adapter=adapter, fetch=True, revision=revision)
    log(chosen.note)
    return load_pair(chosen, dtype, load)


def load_pair(
    chosen: Pair, dtype: str | None, load: Callable, group: Any = None
) -> tuple[Any, Any, Any, Any]:
    """Loads the models of a pair; says before, on standard error, if they will hardly fit.

    Args:
        chosen: which models.
        dtype: compute in this type; None keeps the folder's.
        load: reads a model's folder, as `model.load` does.
        group: of `mx.distributed`, whose processes share the target; None if this one has all of
            it.

    Returns:
        The target, the drafter (None for regular decoding), the target's tokenizer (None if its
        folder has none) and the draft's (None if it has none, or there is no draft).

    Raises:
        UserError: a model cannot be read, or the two do not fit each other.
    """
    from mlx_t5.drafting.draft_model import DraftModel
    from mlx_t5.drafting.source_copy import CopyOrDraft, SourceCopy

    _advise(chosen, dtype, group.size() if group else 1)
    merged = {} if chosen.adapter is None else {"adapter": chosen.adapter}
    of_group = {"group": group} if group else {}
    target, tokenizer = load(chosen.target, dtype, **merged, **of_group)
    draft, draft_tokenizer = None, None
    if chosen.draft:
        draft, draft_tokenizer = load(chosen.draft, dtype, shared_with=target)
    drafter: Any = DraftModel(draft, target) if draft else None
    if chosen.lookup:
        copy = SourceCopy(tokenizer)
        drafter = CopyOrDraft(copy, drafter) if drafter else copy
    return target, drafter, tokenizer, draft_tokenizer


def _advise(chosen: Pair, dtype: str | None, ranks: int) -> None:
    """Says on standard error if a pair will hardly fit, or would compute in float32 unasked."""
    from mlx_t5.network.memory import dtype_hint, warning
    from mlx_t5.network.sharing import ENTRY
    from mlx_t5.network.weights import read_config

    folders = [folder for folder in (chosen.target, chosen.draft) if folder]
    with contextlib.suppress(UserError):  # loading says what is wrong with a folder
        for folder in folders:
            if hint := dtype_hint(folder, dtype):
                log(f"hint: {hint}")
        whole_head = ranks > 1 and ENTRY in read_config(folders[-1])
        if large := warning(folders, dtype, ranks, whole_head):
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
    """The draft of a target where none is named, and why it is that or none.

    Args:
        target: its folder.
        convert: see `locate`.
        fetch: whether what is not there may be fetched.
        is_new: whether the target was: then nobody is surprised that a draft is converted as well.
            Without converting it comes along in any case, as the default drafts are small.
    """
    from mlx_t5.checkpoints.default_drafts import default_draft
    from mlx_t5.checkpoints.hub import is_cached

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
    """Whether a target and a draft, known by their folders' names alone, have like tokens."""
    from mlx_t5.network.config import T5Config
    from mlx_t5.network.weights import read_config

    try:
        configs = [T5Config.from_dict(read_config(folder)) for folder in (target, draft)]
    except UserError:
        return True  # loading them says what is wrong
    names = ("vocab_size", "eos_token_ids", "decoder_start_token_id")
    return len({tuple(getattr(config, name) for name in names) for config in configs}) == 1


def _shown(folder: Path) -> str:
    """A folder as short as can be: its Hub id, or relative to where the user stands."""
    from mlx_t5.checkpoints.small_files import snapshot_id

    if hub_id := snapshot_id(folder):
        return hub_id
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
