"""Writes model folders in Hugging Face's layout; a folder appears complete or not at all.

The folder is written beside its final path as `NAME.partial`, which the next run for `NAME` removes
if this one is stopped. Weights are written in shards, one after the other, so that writing takes
little memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_t5.backend import mx
from mlx_t5.checkpoints.hub import snapshot_id
from mlx_t5.disk import MODULE_FOLDER, SAFETENSORS, SMALL_FILES, lock
from mlx_t5.errors import UserError, reason

SHARD_BYTES = 500_000_000  # of arrays that wait in memory to be written together
_WEIGHTS = re.compile(
    r"README\.md|config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


def is_model_file(name: str) -> bool:
    return name in SMALL_FILES or any(p.fullmatch(name) for p in (_WEIGHTS, MODULE_FOLDER))


def check_output_folder(
    path: Path,
    overwrite: bool,
    is_output: Callable[[str], bool] = is_model_file,
    source: Path | None = None,
) -> None:
    """Refuses an output folder that must not be written to.

    Args:
        path: the folder's path.
        overwrite: whether an existing folder may be replaced.
        is_output: whether an earlier run may have written a file of this name. A folder that holds
            anything else is never replaced.
        source: the model folder that is read; neither it nor a part of it is replaced.
    """
    old = path.with_name(f"{path.name}.old")
    if os.path.lexists(old) and not os.path.lexists(path):
        cause = f"{old} is the earlier {path.name}: a run was stopped while it replaced it"
        raise UserError(f"{cause}; rename it back, or remove it")
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; choose another folder")
    if source is not None:  # compared as files: the disks of Macs ignore case in names
        source = source.resolve()
        pairs = [(path, f) for f in (source, *source.parents)] + [(source, f) for f in path.parents]
        if any(one.samefile(other) for one, other in pairs):
            raise UserError(f"{path} is the source, contains it or is part of it; choose another")
    if not overwrite:
        raise UserError(f"{path} exists; replace it with --overwrite or choose another folder")
    for file in path.rglob("*"):
        name, folder = file.relative_to(path), file.parent
        in_module = folder.parent == path and MODULE_FOLDER.fullmatch(folder.name) is not None
        is_module = MODULE_FOLDER.fullmatch(file.name) is not None
        if file.is_dir():
            known = is_module and folder == path
        else:
            of_macos = file.name == ".DS_Store" or file.name.startswith("._")
            known = (is_output(file.name) and not is_module) or of_macos
            known = known and (folder == path or in_module)
        if not known:
            raise UserError(f"{path} holds more than a model ({name}); remove it yourself")


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a new folder, which is renamed to `path` if the block ends without an error."""
    partial, old = (path.with_name(f"{path.name}.{kind}") for kind in ("partial", "old"))
    try:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            if not lock(descriptor):
                raise UserError(f"another run writes to {path}; wait until it is done")
            for path_left in partial.iterdir():
                if path_left.is_dir():
                    shutil.rmtree(path_left)
                else:
                    path_left.unlink()
            try:
                yield partial
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            if os.path.lexists(path):
                if not overwrite:
                    raise UserError(f"{path} was made in the meantime; the new folder is {partial}")
                # A run that was stopped after replacing has left it.
                shutil.rmtree(old, ignore_errors=True)
                os.rename(path, old)
            os.replace(partial, path)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # MLX raises the latter, too, if the disk is full
        raise UserError(f"cannot write {path}: {reason(error)}") from error


@contextmanager
def new_model_folder(path: Path, overwrite: bool, source: Path) -> Iterator[Path]:
    """Like `new_folder`; first copies the source's tokenizer and configuration files into it."""
    small = [source / name for name in SMALL_FILES if (source / name).is_file()]
    for file in small:
        require_own(file, source)
    with new_folder(path, overwrite) as partial:
        for file in small:
            shutil.copyfile(file, partial / file.name)
        yield partial


def copy_modules(source: Path, target: Path) -> None:
    """Copies the folders of sentence-transformers' modules."""
    for file in source.glob("*_*/*"):
        if MODULE_FOLDER.fullmatch(file.parent.name) and file.is_file():
            require_own(file, source)
            (target / file.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(file, target / file.parent.name / file.name)


def require_own(file: Path, folder: Path) -> None:
    """Refuses a link out of a model's folder: the copy of a private file might be uploaded."""
    folder = folder.resolve()
    allowed, repository = [folder], folder.parent.parent
    if snapshot_id(folder):
        allowed += [repository / "blobs", repository.parent / "blobs"]
    if not any(file.resolve().is_relative_to(folder) for folder in allowed):
        raise UserError(f"{file} is a link out of its folder; put a copy of the file there")


def save_weights(folder: Path, tensors: Iterable[tuple[str, mx.array]], format: str) -> None:
    """Writes shards and their index; each tensor is evaluated in turn, and dropped once written."""
    weight_map: dict[str, int] = {}
    total = 0
    # MLX would keep freed buffers, of the many sizes that tensors have.
    cache_limit = mx.set_cache_limit(0)
    try:
        shards = 0
        for shards, shard in enumerate(_shards(tensors), 1):
            file = folder / f"model-{shards}.safetensors"
            mx.save_safetensors(str(file), shard, {"format": format})
            weight_map |= dict.fromkeys(shard, shards)
            total += sum(array.nbytes for array in shard.values())
            shard.clear()  # before the next one is filled
    finally:
        mx.set_cache_limit(cache_limit)
    files = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    files = files if shards > 1 else [SAFETENSORS]
    for i, name in enumerate(files, 1):
        os.rename(folder / f"model-{i}.safetensors", folder / name)
    index = {name: files[i - 1] for name, i in sorted(weight_map.items())}
    entries = {"metadata": {"total_size": total}, "weight_map": index}
    write_json(folder / f"{SAFETENSORS}.index.json", entries)


def _shards(tensors: Iterable[tuple[str, mx.array]]) -> Iterator[dict[str, mx.array]]:
    shard: dict[str, mx.array] = {}
    size = 0
    for name, array in tensors:
        mx.eval(array)
        if shard and size + array.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
