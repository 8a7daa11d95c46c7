"""Finds the folder of a model by its name, and downloads a model that is named by its Hub id.

A name is a folder, the name of a folder in `models/` (where convert.py writes), or a Hub id, whose
snapshot is read as it is. Downloads use `huggingface_hub`, so the library's progress bars, cache
(`HF_HOME`), token (`HF_TOKEN` or `hf auth login`) and `HF_HUB_OFFLINE` work as usual. Of a
repository's files only those that T5 needs are downloaded: safetensors, or else torch's `.bin`, but
never the TensorFlow, Flax, Rust or ONNX weights, which may be equally large.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_t5.disk import (
    CLONE,
    MODULE_FOLDER,
    MODULES,
    SAFETENSORS,
    SMALL_FILES,
    TORCH,
    absolute,
    read_object,
)
from mlx_t5.errors import UserError, log

MODELS = Path("models")  # in the working directory, or else in the clone
ADAPTED = " with adapter "  # in the result of `source_of`
# Old ids without an owner; the Hub redirects them to the present repositories.
_RENAMED = MappingProxyType(
    {f"t5-{size}": f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")}
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def locate(name: str, revision: str | None = None) -> Path:
    """Returns the folder of the model with this name; see `converted` for names in `models/`.

    Args:
        name: the user's name for the model.
        revision: a branch, tag or commit of a Hub id; with a revision `models/` is not searched.

    Raises:
        UserError: the path does not exist, a revision is given for a folder, or the Hub id cannot
            be downloaded.
    """
    if not name:
        raise UserError("a model's name is empty; give a folder or a Hub id")
    absolute(name)  # refuses impossible paths
    path = Path(name).expanduser()
    if not path.exists() and path.parts[0] in ("models", "demo"):
        path = CLONE / path  # README's paths work from any directory
    if path.is_dir():
        if revision is not None:
            raise UserError(f"{name} is a folder, and a revision is of a Hub id; leave it out")
        return path
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that has config.json and the weights")
    if not _HUB_ID.fullmatch(name) or name.startswith(f"{MODELS}/"):
        raise UserError(f"there is no model folder {name}; make one with: python convert.py")
    if revision is None and (folder := converted(name)):
        if "/" in name:
            log(f"{name}: taken from {folder}, which was converted from it")
        return folder
    return download(name, revision)


def converted(name: str) -> Path | None:
    """Returns the folder in `models/` that holds a model; None if there is none.

    A name without an owner is the folder's. A Hub id with one is in the folder of its last part, if
    this folder was converted from this id, as another owner may have a model of the same name.
    """
    folders = (above / name.rpartition("/")[2] for above in (MODELS, CLONE / MODELS))
    folder = next((folder for folder in folders if folder.is_dir()), None)
    return None if folder and "/" in name and source_of(folder) != full_id(name) else folder


def source_folder(name: str, revision: str | None = None) -> Path:
    """Returns the folder that convert.py reads: a local one, or the snapshot of a Hub id.

    Raises:
        UserError: as `download`; or `name` is neither a folder nor has the form of a Hub id.
    """
    absolute(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not name or folder.exists() or not _HUB_ID.fullmatch(name):
        raise UserError(f"{name!r} is neither a folder nor a Hub id such as google-t5/t5-small")
    return download(name, revision)


def full_id(name: str) -> str:
    """Returns a Hub id with its owner; adds the owner to an old id without one (`t5-11b`)."""
    return _RENAMED.get(name, name)


def snapshot_id(folder: Path) -> str | None:
    """Returns the Hub id of a snapshot in Hugging Face's cache; None for other folders."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def source_of(folder: Path) -> str | None:
    """Returns the Hub id, with its owner, of a converted folder or a snapshot; None if unknown.

    If an adapter was merged when the folder was converted, returns "SOURCE with adapter ADAPTER",
    where SOURCE is the Hub id or, without one, the name of the folder that was converted.
    """
    try:
        record: Any = read_object(folder / "config.json", "").get("converted_from")
    except UserError:
        return None  # loading reports a damaged folder
    if not isinstance(record, dict):
        record = {"model": snapshot_id(folder)}
    model, adapter = record.get("model"), record.get("adapter")
    name = full_id(model) if isinstance(model, str) else None
    return name if adapter is None else f"{name or record.get('folder')}{ADAPTED}{adapter}"


def origin(
    name: str, revision: str | None, folder: Path, adapter: str | Path | None = None
) -> dict[str, str]:
    """Returns `converted_from`, the entry of an MLX folder's config.json that names the source.

    Args:
        name: as given to `source_folder`.
        revision: as given to `source_folder`.
        folder: the result of `source_folder`.
        adapter: the folder of the merged adapter, if there is one.

    Returns:
        A dictionary. For a Hub id it has `model` (the id with its owner) and, if known, `revision`
        (as requested) and `commit`. For a local folder it has `folder` (the folder's name). With an
        adapter it has `adapter` (the name of the adapter's folder).
    """
    merged = {} if adapter is None else {"adapter": absolute(adapter).name}
    if folder == Path(name).expanduser():
        return {"folder": folder.resolve().name, **merged}
    requested = {} if revision is None else {"revision": revision}
    commit = {"commit": folder.name} if snapshot_id(folder) else {}
    return {"model": full_id(name), **requested, **commit, **merged}


def choose_files(listed: Iterable[str]) -> list[str]:
    """Chooses what to download from a repository: small files, modules and one set of weights.

    An index is ignored if one of its shards is missing, because some repositories have an index
    that is out of date.

    Args:
        listed: every file name in the repository.

    Returns:
        The names of the files to download. If the repository has no readable weights, the names
        include no weights.
    """
    names = set(listed)
    small = [name for name in SMALL_FILES if name in names] + _module_files(names)
    for main in (SAFETENSORS, TORCH):
        if main in names:
            return [*small, main]
        index = f"{main}.index.json"
        stem, suffix = main.rsplit(".", 1)
        shards = re.compile(rf"{stem}-\d{{5}}-of-(\d{{5}})\.{suffix}")
        for total in sorted({int(match[1]) for match in map(shards.fullmatch, names) if match}):
            whole = [f"{stem}-{i + 1:05}-of-{total:05}.{suffix}" for i in range(total)]
            if index in names and names.issuperset(whole):
                return [*small, index, *whole]
    return small


def _module_files(listed: set[str]) -> list[str]:
    """Chooses the files of a sentence encoder's modules, at most one weight file per module."""
    if MODULES not in listed:
        return []
    names = {name for name in listed if MODULE_FOLDER.fullmatch(name.partition("/")[0])}
    chosen = []
    for folder in sorted({name.partition("/")[0] for name in names}):
        weights = [
            f"{folder}/{main}" for main in (SAFETENSORS, TORCH) if f"{folder}/{main}" in names
        ]
        chosen += [name for name in (f"{folder}/config.json", *weights[:1]) if name in names]
    return chosen


def download(name: str, revision: str | None = None) -> Path:
    """Returns the snapshot of a Hub id in Hugging Face's cache, downloaded if necessary.

    If the download fails, a complete snapshot that is already in the cache is used.

    Raises:
        UserError: there is no such repository, access is refused, the download fails and nothing is
            cached, or the repository has no weights that this project can read.
    """
    # Imported here because it is slow to import and local folders do not need it.
    from huggingface_hub import HfApi, errors, snapshot_download

    where = name if revision is None else f"{name} at revision {revision}"
    try:
        info = HfApi().model_info(name, revision=revision)
        files = choose_files(sibling.rfilename for sibling in info.siblings or ())
        if not _is_complete(files):
            whole = f"whole {SAFETENSORS} or {TORCH}"
            lacks = whole if "config.json" in files else "config.json"
            raise UserError(f"{where}: the repository has no {lacks}; choose another model")
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except UserError:
        raise
    except errors.GatedRepoError:
        cure = "accept its terms on huggingface.co, then `hf auth login`"
        raise UserError(f"{where}: access is restricted; {cure}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{where}: there is no such revision on the Hugging Face Hub") from None
    except errors.RepositoryNotFoundError:
        cure = "check the spelling; if it is private, `hf auth login`"
        raise UserError(f"{where}: no such folder, and no such model on the Hub; {cure}") from None
    except Exception as error:  # the type depends on the library's version and the transport
        snapshot = cached(name, revision)
        if snapshot is None:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            cure = "connect, or give a local folder"
            if "No space left" in reason:  # hf_xet does not raise an OSError for a full disk
                cure = "make room, or set HF_HOME to a folder on another disk"
            raise UserError(f"{where}: cannot be downloaded ({reason}); {cure}") from error
        return snapshot


def cached(name: str, revision: str | None = None) -> Path | None:
    """Returns the snapshot of an earlier, complete download; None if there is none."""
    from huggingface_hub import snapshot_download

    for main in (SAFETENSORS, TORCH):
        stem, suffix = main.rsplit(".", 1)
        patterns = [*SMALL_FILES, main, f"{main}.index.json", f"{stem}-*-of-*.{suffix}"]
        try:
            folder = snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        except (OSError, ValueError):
            continue
        if _is_complete(choose_files(os.listdir(folder))):
            return Path(folder)
    return None


def _is_complete(files: list[str]) -> bool:
    return "config.json" in files and files[-1] not in SMALL_FILES and "/" not in files[-1]
