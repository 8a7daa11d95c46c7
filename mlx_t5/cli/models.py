"""Which target and which draft to run: from the names a user gives to model folders.

A name is a folder (converted, or as Hugging Face saved it), the name of a folder in `models/`, or
a Hub id, which is converted into `models/` the first time it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.cli.arguments import LOOKUP
from mlx_t5.errors import UserError, shown

BUNDLED = Path(__file__).parents[2] / "demo"
CONVERTED = Path("models")  # in the working folder, where convert.py writes as well
Convert = Callable[[str, Path], object]
DEFAULT_TARGET, DEFAULT_DRAFT = "t5-11b", "t5-small"
WITH_ADAPTER = " with adapter "
OTHERWISE = "--draft-model lookup copies from the prompt, distill.py makes a draft"


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
    convert: Convert,
    regular: bool = False,
    adapter: str | None = None,
    regular_because: str = "regular decoding",
    fetch: bool = False,
) -> Pair:
    """Finds the models to run, and converts them if need be.

    Args:
        model: name of the target; None takes t5-11b where it and t5-small are converted, and the
            bundled pair otherwise.
        draft_model: name of the draft; "lookup" to copy from the source instead, "NAME+lookup" to
            do both, "none" to do without. None takes the target's default draft, if it has one
            and that is there.
        convert: makes the model of a Hub id into a folder, as `convert.convert` does.
        regular: do without a draft, whatever `draft_model` says.
        adapter: folder of a LoRA adapter to merge into the target.
        regular_because: what the user is told then.
        fetch: whether a default draft may be converted, from Hugging Face's cache, or from the Hub
            if the target was as well.

    Raises:
        UserError: there is no such model, or it cannot be converted.
    """
    from mlx_t5.checkpoints.adapter_config import adapter_folder

    draft: Path | None = None
    merged = None if adapter is None else adapter_folder(adapter)  # before anything is converted
    why, is_new = "", model is not None and not _folder_of(model).is_dir()
    if model is None:
        target, draft, why = _default_pair()
    else:
        target = locate(model, convert)
    lookup = not regular and draft_model is not None and draft_model.split("+")[-1] == LOOKUP
    if regular or draft_model == "none":
        draft, why = None, f"{why}{regular_because}"
    elif draft_model == LOOKUP:
        draft = None
    elif draft_model is not None:
        draft = locate(draft_model.removesuffix(f"+{LOOKUP}"), convert)
    elif model is not None:
        may = fetch and "MLX_RANK" not in os.environ  # several ranks would all convert it
        draft, why = _default_draft(target, convert if may else None, is_new)
    names = f"target {_shown(target)}" + (f" with {_shown(merged)}" if merged else "")
    names += f", draft {_shown(draft)}" if draft else ""
    names += ", copying from the source" if lookup else ""
    note = f"{names} ({why.removesuffix('; ')})" if why else names
    return Pair(target, draft, lookup, note, merged)


def locate(name: str, convert: Convert) -> Path:
    """The folder that a model's name stands for; converts a Hub id that is new here.

    A folder in `models/` has the last part of a Hub id for its name, which others may share. So the
    id that it was converted from, which its config.json keeps, has to be the one asked for.

    Args:
        name: as the user gives it.
        convert: makes the model of a Hub id into a folder.

    Raises:
        UserError: the name is a path to nothing, the Hub id cannot be had or converted, or the
            folder was converted from another one.
    """
    folder = _folder_of(name)
    if folder.is_dir():
        if folder != Path(name).expanduser():
            _require_same(name, folder)
    else:
        convert(name, folder)
        print(f"converted {name} to {folder}; it is there from now on", file=sys.stderr)
    return folder


def _folder_of(name: str) -> Path:
    """The folder that a model's name stands for; that of a Hub id may not be there yet.

    Raises:
        UserError: the name is a path to nothing.
    """
    from mlx_t5.checkpoints.small_files import place

    place(name)  # refuses what leads nowhere
    path = Path(name).expanduser()
    if not name:
        raise UserError("a model's name is empty; give a folder or a Hub id")
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that has config.json and the weights")
    if not _may_be_hub_id(name):
        raise UserError(f"there is no model folder {name}; make one with: python convert.py")
    return CONVERTED / name.rsplit("/", 1)[-1]


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
                print(f"hint: {hint}", file=sys.stderr, flush=True)
        whole_head = ranks > 1 and ENTRY in read_config(folders[-1])
        if large := warning(folders, dtype, ranks, whole_head):
            print(f"warning: {large}", file=sys.stderr, flush=True)


def _require_same(name: str, folder: Path) -> None:
    """Refuses a folder in `models/` that was converted from another Hub id than `name`.

    Of a folder without a record (converted from a local folder, or long ago) nothing is known but
    its name: it is taken, with a warning if an owner was asked for.
    """
    from mlx_t5.checkpoints.hub import full_id

    hub_id, source = full_id(name), _source(folder)
    if "/" not in hub_id or source == hub_id:  # without an owner it is the folder's own name
        return
    if source:
        raise UserError(
            f"{folder} was converted from {shown(source)}, not from {hub_id}; give {folder} to run "
            f"it, or convert the other one: python convert.py --model {name} --mlx-path "
            f"{folder.with_name(hub_id.replace('/', '-'))}"
        )
    if "/" in name:
        print(
            f"warning: {folder} does not say which model it was converted from; it is taken for "
            f"{name} (python convert.py --model {name} --overwrite makes it anew)",
            file=sys.stderr,
        )


def _source(folder: Path) -> str | None:
    """The Hub id, with its owner, that a folder was converted from; None if it does not say.

    With an adapter merged into it, it is another model: then that is said as well.
    """
    from mlx_t5.checkpoints.hub import full_id
    from mlx_t5.network.weights import read_config

    try:
        record = read_config(folder).get("converted_from")
    except UserError:
        return None  # loading it says what is wrong
    if not isinstance(record, dict):
        return None
    model, adapter = record.get("model"), record.get("adapter")
    name = full_id(model) if isinstance(model, str) else None
    return name if adapter is None else f"{name or record.get('folder')}{WITH_ADAPTER}{adapter}"


def _default_pair() -> tuple[Path, Path, str]:
    pair = CONVERTED / DEFAULT_TARGET, CONVERTED / DEFAULT_DRAFT
    if all(folder.is_dir() for folder in pair):
        for folder in pair:
            _require_same(folder.name, folder)
        return *pair, ""
    missing = " and ".join(str(folder) for folder in pair if not folder.is_dir())
    return BUNDLED / "target", BUNDLED / "draft", f"the bundled pair: no {missing}; "


def _default_draft(
    target: Path, convert: Convert | None, download: bool
) -> tuple[Path | None, str]:
    """The draft of a target where none is named, and why it is that or none.

    Args:
        target: its folder.
        convert: makes the model of a Hub id into a folder; None leaves what is not there.
        download: whether that may come from the Hub, and not from Hugging Face's cache alone.
    """
    from mlx_t5.checkpoints.default_drafts import default_draft
    from mlx_t5.checkpoints.hub import is_cached

    if target.resolve() == (BUNDLED / "target").resolve():
        return BUNDLED / "draft", ""
    name = default_draft((_source(target) or target.name).partition(WITH_ADAPTER)[0])
    if name is None:
        return None, f"no --draft-model given and no default for it: regular decoding; {OTHERWISE}"
    folder = CONVERTED / name.rsplit("/", 1)[-1]
    if not folder.is_dir() and convert and (download or is_cached(name)):
        print(f"its default draft is {name}; --draft-model none does without", file=sys.stderr)
        try:
            locate(name, convert)
        except UserError as error:
            return None, f"regular decoding: no default draft, as {error}"
    if not folder.is_dir():
        cure = f"python convert.py --model {name}"
        return None, f"regular decoding: its default draft is not there; get it with: {cure}"
    if _source(folder) not in (None, name) or not _fit(target, folder):
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


def _may_be_hub_id(name: str) -> bool:
    """Whether `name` reads as `model` or `owner/model`, and not as a path."""
    parts = name.split("/")
    plain = all(part and part[0].isalnum() and part.isascii() for part in parts)
    return plain and len(parts) <= 2 and parts[0] != str(CONVERTED) and "\\" not in name


def _shown(folder: Path) -> str:
    """A folder as short as can be: relative to where the user stands, if it lies below."""
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
