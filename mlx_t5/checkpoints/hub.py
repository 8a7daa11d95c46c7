"""Finds the folder of a model by its name, and downloads a model that is named by its Hub id.

A name is a folder, the name of a folder in `models/` (where `mlx_t5.convert` writes), or a Hub id,
whose snapshot is read as it is. Downloads use `huggingface_hub`, so the library's progress bars,
cache (`HF_HOME`), token (`HF_TOKEN` or `hf auth login`) and `HF_HUB_OFFLINE` work as usual. Of a
repository's files only those that T5 needs are downloaded: safetensors, or else torch's `.bin`, but
never the TensorFlow, Flax, Rust or ONNX weights, which may be equally large.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_t5 import disk
from mlx_t5.disk import SAFETENSORS, SMALL_FILES, TORCH, absolute, read_object
from mlx_t5.errors import UserError, log
from mlx_t5.installation import HOME, MODELS, command

ADAPTED = " with adapter "  # in the result of `source_of`
# Old ids without an owner; the Hub redirects them to the present repositories.
_RENAMED = {f"t5-{size}": f"google-t5/t5-{size}" for size in "small base large 3b 11b".split()}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def locate(name: str, revision: str | None = None) -> Path:
    """The folder of the model that a user names: a path, a name in `models/`, or a Hub id.

    Args:
        name: the user's name for the model.
        revision: a branch, tag or commit of a Hub id; with a revision `models/` is not searched.

    Raises:
        UserError: there is no such model, or the Hub id cannot be downloaded.
    """
    if not name:
        raise UserError("a model's name is empty; give a folder or a Hub id")
    path = _local(name)
    if path.is_dir():
        if revision is not None:
            raise UserError(f"{name} is a folder, and a revision is of a Hub id; leave it out")
        return path
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that has config.json and the weights")
    if not _HUB_ID.fullmatch(name) or name.startswith("models/"):
        raise UserError(f"there is no model folder {name}; make one with: {command('convert')}")
    if revision is None and (folder := converted(name)):
        if "/" in name:
            log(f"{name}: taken from {folder}, which was converted from it")
        return folder
    return download(name, revision)


def converted(name: str) -> Path | None:
    folders = (above / name.rpartition("/")[2] for above in (MODELS, HOME / MODELS))
    folder = next((folder for folder in folders if folder.is_dir()), None)
    # Another owner may have a model of the same name.
    return None if folder and "/" in name and source_of(folder) != full_id(name) else folder


def _local(name: str) -> Path:
    """The path that a name has if it is one; README's paths work from any directory."""
    absolute(name)  # refuses impossible paths
    path = Path(name).expanduser()
    if path.exists() or path.parts[0] not in ("models", "demo"):
        return path
    return HOME / (MODELS if path.parts[0] == "models" else Path("demo")).joinpath(*path.parts[1:])


def source_folder(name: str, revision: str | None = None) -> Path:
    """The folder that a conversion reads: a local one, or the snapshot of a Hub id."""
    folder = _local(name)
    if name and folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(name):  # Path("") exists
        raise UserError(f"{name!r} is neither a folder nor a Hub id such as google-t5/t5-small")
    return download(name, revision)


def full_id(name: str) -> str:
    return _RENAMED.get(name, name)


def snapshot_id(folder: Path) -> str | None:
    """The Hub id of a snapshot in Hugging Face's cache; None for other folders."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def source_of(folder: Path) -> str | None:
    """The Hub id that a folder comes from, with "… with adapter NAME" if one was merged."""
    try:
        record: Any = read_object(folder / "config.json", "").get("converted_from")
    except UserError:
        return None  # loading reports a damaged folder
    if not isinstance(record, dict):
        record = {"model": snapshot_id(folder)}
    model, adapter = record.get("model"), record.get("adapter")
    name = full_id(model) if isinstance(model, str) else None
    local = Path(str(record.get("folder"))).name
    return name if adapter is None else f"{name or local}{ADAPTED}{adapter}"


def origin(
    name: str, revision: str | None, folder: Path, adapter: str | Path | None = None
) -> dict[str, str]:
    """The entry `converted_from` of an MLX folder's config.json."""
    if folder == _local(name):
        record = {"folder": str(folder.resolve())}
    else:
        record = {"model": full_id(name)}
        record |= {"revision": revision} if revision is not None else {}
        record |= {"commit": folder.name} if snapshot_id(folder) else {}
    return record if adapter is None else {**record, "adapter": absolute(adapter).name}


def choose_files(listed: Iterable[str]) -> list[str]:
    """What to download from a repository: small files, modules and one complete set of weights."""
    names = set(listed)
    small = [name for name in SMALL_FILES if name in names]
    if disk.MODULES in names:
        for folder in sorted({name.partition("/")[0] for name in names if "/" in name}):
            files = [f"{folder}/{name}" for name in ("config.json", SAFETENSORS, TORCH)]
            if disk.MODULE_FOLDER.fullmatch(folder):
                small += [name for name in files if name in names][:2]
    for main in (SAFETENSORS, TORCH):
        if main in names:
            return [*small, main]
        index = f"{main}.index.json"
        stem, suffix = main.rsplit(".", 1)
        shards = re.compile(rf"{stem}-\d{{5}}-of-(\d{{5}})\.{suffix}")
        for total in sorted({int(match[1]) for match in map(shards.fullmatch, names) if match}):
            # Some repositories have an index that is out of date.
            whole = [f"{stem}-{i + 1:05}-of-{total:05}.{suffix}" for i in range(total)]
            if index in names and names.issuperset(whole):
                return [*small, index, *whole]
    return small


def download(name: str, revision: str | None = None) -> Path:
    """The snapshot of a Hub id, downloaded if necessary; offline, the one in the cache.

    Raises:
        UserError: there is no such repository, no access, no network, or no readable weights.
    """
    # Imported here because it is slow to import and local folders do not need it.
    from huggingface_hub import HfApi, errors, snapshot_download

    where = name if revision is None else f"{name} at revision {revision}"
    try:
        info = HfApi().model_info(name, revision=revision)
        files = choose_files(sibling.rfilename for sibling in info.siblings or ())
        if not _is_complete(files):
            part = f"whole {SAFETENSORS} or {TORCH}" if "config.json" in files else "config.json"
            raise UserError(f"{where}: the repository has no {part}; choose another model")
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except UserError:
        raise
    except errors.GatedRepoError:
        cause = "access is restricted; accept its terms on huggingface.co, then `hf auth login`"
    except errors.RevisionNotFoundError:
        cause = "there is no such revision on the Hugging Face Hub"
    except errors.RepositoryNotFoundError:
        cause = "no such folder, and no such model on the Hub; check the spelling or log in"
    except Exception as error:  # the type depends on the library's version and the transport
        if snapshot := cached(name, revision):
            return snapshot
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = "connect, or give a local folder"
        if "No space left" in reason:  # hf_xet does not raise an OSError for a full disk
            cure = "make room, or set HF_HOME to a folder on another disk"
        cause = f"cannot be downloaded ({reason}); {cure}"
    raise UserError(f"{where}: {cause}")


def cached(name: str, revision: str | None = None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        # Of the small files only: of the weights, all but one set were left out on purpose.
        folder = snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES],
                                   local_files_only=True)  # fmt: skip
    except (OSError, ValueError):
        return None
    return Path(folder) if _is_complete(choose_files(os.listdir(folder))) else None


def _is_complete(files: list[str]) -> bool:
    return "config.json" in files and files[-1] not in SMALL_FILES and "/" not in files[-1]
