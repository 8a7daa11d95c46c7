"""Finds the folder of a model, and downloads a model that is named by its Hub id.

Downloads use `huggingface_hub`, so the library's progress bars, cache (`HF_HOME`), token
(`HF_TOKEN` or `hf auth login`) and `HF_HUB_OFFLINE` work as usual. The repository's files are
listed first, and only those that T5 needs are downloaded. The weights are safetensors, or else
torch's `.bin`, but never both, and never the TensorFlow, Flax, Rust or ONNX versions, which may be
equally large.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from mlx_t5.checkpoints.checkpoint import SAFETENSORS, TORCH
from mlx_t5.checkpoints.output_folder import require_space
from mlx_t5.checkpoints.small_files import MODULE_FOLDER, MODULES, SMALL_FILES, place, snapshot_id
from mlx_t5.errors import UserError

# Old ids without an owner; the Hub redirects them to the present repositories.
_RENAMED = MappingProxyType(
    {f"t5-{size}": f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")}
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(name: str, revision: str | None = None) -> Path:
    """Returns the folder that holds the model of this name.

    Args:
        name: a local folder, which is returned without using the network; or a Hub id such as
            `google/flan-t5-xl`. The Hub redirects old, short ids (`t5-11b`).
        revision: a branch, tag or commit of the Hub repository; None is its main branch.

    Returns:
        The local folder, or the snapshot in Hugging Face's cache. If the download fails, a complete
        snapshot that is already in the cache is used.

    Raises:
        UserError: there is no such folder or repository, access is refused, the download fails and
            nothing is cached, there is too little disk space, or the repository has no weights that
            this project can read.
    """
    place(name)  # refuses impossible paths
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not name or folder.exists() or not _HUB_ID.fullmatch(name):
        raise UserError(f"{name!r} is neither a folder nor a Hub id such as google-t5/t5-small")
    return _download(name, revision)


def is_cached(name: str) -> bool:
    """Returns whether Hugging Face's cache has a complete snapshot of a Hub id; works offline."""
    return _cached(name, None) is not None


def full_id(name: str) -> str:
    """Returns a Hub id with its owner; adds the owner to an old id without one (`t5-11b`)."""
    return _RENAMED.get(name, name)


def origin(
    name: str, revision: str | None, folder: Path, adapter: str | Path | None = None
) -> dict[str, str]:
    """Returns `converted_from`, the entry of an MLX folder's config.json that names the source.

    Args:
        name: as given to `resolve`.
        revision: as given to `resolve`.
        folder: the result of `resolve`.
        adapter: the folder of the merged adapter, if there is one.

    Returns:
        A dictionary. For a Hub id it has `model` (the id with its owner) and, if known, `revision`
        (as requested) and `commit`. For a local folder it has `folder` (the folder's name). With an
        adapter it has `adapter` (the name of the adapter's folder).
    """
    merged = {} if adapter is None else {"adapter": place(adapter).name}
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


def _download(name: str, revision: str | None) -> Path:
    # Imported here because it is slow to import and local folders do not need it.
    from huggingface_hub import HfApi, errors, snapshot_download

    where = name if revision is None else f"{name} at revision {revision}"
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        files = choose_files(sizes)
        _require(files, where)
        if _cached(name, revision) is None:  # with a cached snapshot, a full disk is no error
            _require_space(name, info.sha, {file: sizes[file] for file in files})
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
        cached = _cached(name, revision)
        if cached is None:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            cure = "connect, or give a local folder"
            if "No space left" in reason:  # hf_xet does not raise an OSError for a full disk
                cure = "make room, or set HF_HOME to a folder on another disk"
            raise UserError(f"{where}: cannot be downloaded ({reason}); {cure}") from error
        return cached


def _require_space(name: str, commit: str | None, sizes: Mapping[str, int]) -> None:
    """Raises `UserError` if the disk has no room for the files that are not cached yet.

    Args:
        name: the Hub id.
        commit: the commit to download.
        sizes: the size in bytes of each file to download.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    here = [file for file in sizes if try_to_load_from_cache(name, file, revision=commit)]
    if needed := sum(sizes.values()) - sum(sizes[file] for file in here):
        require_space(Path(HF_HUB_CACHE) / name, needed)


def _cached(name: str, revision: str | None) -> Path | None:
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


def _require(files: list[str], where: str) -> None:
    if not _is_complete(files):
        lacks = "config.json" if "config.json" not in files else f"whole {SAFETENSORS} or {TORCH}"
        raise UserError(f"{where}: the repository has no {lacks}; choose another model")
