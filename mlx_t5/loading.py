"""Finds a target and its draft by the names that the user gives, and loads them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_t5.backend import mx, on_cpu
from mlx_t5.checkpoints import hub
from mlx_t5.checkpoints.adapters import adapter_folder
from mlx_t5.checkpoints.reading import TorchTensor, read_weights, stored_dtype
from mlx_t5.disk import BUNDLED, SAFETENSORS
from mlx_t5.drafting.draft_model import DraftModel
from mlx_t5.drafting.named import DRAFTERS, make_drafter, split_name
from mlx_t5.drafting.proposals import Drafter
from mlx_t5.errors import UserError, log
from mlx_t5.installation import HOME, MODELS, command
from mlx_t5.model import T5, load
from mlx_t5.network.sizes import warning
from mlx_t5.settings import AUTO, NONE
from mlx_t5.text.tokenizer import same_vocabulary

DEFAULT_TARGET, DEFAULT_DRAFT = "t5-11b", "t5-small"
# The default draft of public models is the family's "small", where it pays: where a pass of the
# small decoder and head reads at most a tenth of the target's. It is 0.100 for t5-large, 0.007 for
# t5-11b, 0.027 for flan-t5-xl, 0.080 for mt5-xl, 0.078 for byt5-xl; but 0.24 for mt5-large and
# byt5-large, and 0.31 to 0.52 for the base models.
_FAMILIES = (
    ("google-t5/t5-", ("large", "3b", "11b")),
    ("google/flan-t5-", ("large", "xl", "xxl")),
    ("google/t5-v1_1-", ("large", "xl", "xxl")),
    ("google/mt5-", ("xl", "xxl")),
    ("google/umt5-", ("xl", "xxl")),
    ("google/byt5-", ("xl", "xxl")),
)
# The Hub id of a target → the Hub id of its draft.
DEFAULT_DRAFTS = {
    f"{family}{size}": f"{family}small" for family, sizes in _FAMILIES for size in sizes
}
_BY_FOLDER = {name.rpartition("/")[2]: name for name in DEFAULT_DRAFTS}


@dataclass(frozen=True)
class ModelPair:
    """The folders of a target and its draft."""

    target: Path
    draft: Path | None
    copy: str  # the name of a drafter that proposes, too, or ""
    note: str  # tells the user which models run and, if there is a reason, why
    adapter: Path | None = None  # a LoRA adapter to merge into the target


def choose_pair(
    model: str | None,
    draft_model: str | None,
    adapter: str | Path | None = None,
    revision: str | None = None,
) -> ModelPair:
    """Returns the models to run; see `hub.locate` for names.

    Args:
        model: name of the target. If None: t5-11b with t5-small if both have been converted,
            otherwise the bundled pair.
        draft_model: name of the draft; that of a drafter, such as "lookup", to use it instead;
            "NAME+lookup" to use both; "none" for no draft. If None or "auto": the target's default
            draft, if it is available.
        adapter: folder of a LoRA adapter to merge into the target.
        revision: revision of the target, if it is a Hub id.

    Raises:
        UserError: a model does not exist or cannot be downloaded.
    """
    merged = None if adapter is None else adapter_folder(adapter)  # before anything is downloaded
    draft: Path | None
    if model is None:
        target, draft, why = _default_pair()
    else:
        target, draft, why = hub.locate(model, revision), None, ""
    name, copy = split_name(draft_model or AUTO)
    if draft_model in (NONE, *DRAFTERS):
        draft = None
    elif name != AUTO:
        draft = hub.locate(name)
    elif model is not None:
        draft, why = _default_draft(target)
    note = f"target {_short_name(target)}"
    if merged:
        note += f" with {_short_name(merged)}"
    if draft:
        note += f", draft {_short_name(draft)}"
    elif draft_model == NONE:
        note += ", no draft"
    if copy:
        note += f", {DRAFTERS[copy].does}"
    if why:
        note += f" ({why})"
    return ModelPair(target, draft, copy, note, merged)


@dataclass(frozen=True)
class LoadedPair:
    """A target and its sources of proposals; in regular decoding, it has none."""

    target: T5
    draft: DraftModel | None
    copy: Drafter | None
    tokenizer: Any  # None if the target's folder has none


def load_pair(chosen: ModelPair, dtype: str | mx.Dtype | None) -> LoadedPair:
    """Loads a pair's models; warns on standard error if they barely fit into memory.

    Args:
        chosen: the folders of the models.
        dtype: type to compute in. If None, float32 on a CPU. On a GPU, the type of an MLX folder,
            and of a Hugging Face folder too if its safetensors have 16 bits; otherwise bfloat16.
            The draft computes in the target's type.

    Raises:
        UserError: a model cannot be read, or the draft does not fit the target.
    """
    if dtype is None and not on_cpu() and _is_slow_to_load(chosen.target):
        dtype = "bfloat16"
        cure = f"{command('convert')} --model {_short_name(chosen.target)}"
        log(f"computing in bfloat16; later starts are faster after: {cure}")
    with contextlib.suppress(UserError):  # if a folder is damaged, loading it reports that
        folders = [folder for folder in (chosen.target, chosen.draft) if folder]
        if large := warning(folders, dtype):
            log(f"warning: {large}")
    target, tokenizer = load(chosen.target, dtype, chosen.adapter)
    draft = None
    if chosen.draft:
        model, draft_tokenizer = load(chosen.draft, dtype or target.dtype, shared_with=target)
        draft = DraftModel(model, target)
        same_vocabulary(tokenizer, draft_tokenizer)
    copy = make_drafter(chosen.copy, tokenizer) if chosen.copy else None
    return LoadedPair(target, draft, copy, tokenizer)


def _is_slow_to_load(folder: Path) -> bool:
    """Whether a folder is in Hugging Face's format, in float32 or as a `.bin`."""
    weights, metadata = read_weights(folder)
    is_bin = any(isinstance(tensor, TorchTensor) for tensor in weights.values())
    return metadata.get("format") != "mlx" and (is_bin or stored_dtype(weights) == mx.float32)


def _default_pair() -> tuple[Path, Path, str]:
    target, draft = hub.converted(DEFAULT_TARGET), hub.converted(DEFAULT_DRAFT)
    if target and draft:
        return target, draft, ""
    if not all((BUNDLED / name / SAFETENSORS).is_file() for name in ("target", "draft")):
        cure = "install the package again, or name models"
        raise UserError(f"the bundled pair is missing in {BUNDLED}; {cure}")
    pair = {DEFAULT_TARGET: target, DEFAULT_DRAFT: draft}
    missing = " and ".join(str(MODELS / name) for name, folder in pair.items() if not folder)
    note = "a demonstration pair: it knows two tasks, and few words"
    return BUNDLED / "target", BUNDLED / "draft", f"{note}; no {missing}"


def default_draft(target: str) -> str | None:
    """The draft's Hub id, given the target's or, without one, the name of the target's folder."""
    return DEFAULT_DRAFTS.get(hub.full_id(_BY_FOLDER.get(target, target)))


def _default_draft(target: Path) -> tuple[Path | None, str]:
    """The folder of a target's default draft, or None, and a note for the user."""
    if target.resolve() == (BUNDLED / "target").resolve():
        return BUNDLED / "draft", ""
    name = default_draft((hub.source_of(target) or target.name).partition(hub.ADAPTED)[0])
    if name is None:
        otherwise = f"lookup copies from the prompt, {command('distill')} makes a draft"
        return None, f"no draft named and no default for it: regular decoding; {otherwise}"
    folder = hub.converted(name) or hub.cached(name)
    if folder is None and hub.snapshot_id(target):  # who names a Hub id expects a download
        log(f"its default draft is {name}; --draft-model none does without")
        try:
            folder = hub.download(name)
        except UserError as error:
            return None, f"regular decoding: no default draft, as {error}"
    if folder is None:
        cure = f"{command('convert')} --model {name}"
        return None, f"regular decoding: its default draft is missing; get it with: {cure}"
    return folder, "its default draft"


def _short_name(folder: Path) -> str:
    """A short name of a folder: its Hub id, or its path from here or from the package."""
    if hub_id := hub.snapshot_id(folder):
        return hub_id
    for base in (Path.cwd(), HOME):
        if folder.resolve().is_relative_to(base):
            return str(folder.resolve().relative_to(base))
    return str(folder)
