"""Writes a model folder in Hugging Face's layout: weights in shards, their index, the small files.

Every tensor is written a few rows at a time, so the memory needed does not depend on the size of
the model. `convert.py`, for example, writes MLX folders with these functions, and `demo/grow.py`
writes Hugging Face folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from tqdm import tqdm

from mlx_t5.backend import mx
from mlx_t5.checkpoints.output_folder import new_folder, require_space
from mlx_t5.checkpoints.safetensors_file import SafetensorsWriter, data_size
from mlx_t5.checkpoints.small_files import MODULE_FOLDER, SMALL_FILES, require_small
from mlx_t5.disk import is_macos_file

BLOCK_BYTES = 16 << 20  # bytes of a tensor in memory at a time; peak memory is a few times as much
SHARD_BYTES = 5 << 30  # maximum size of a shard, as in mlx-lm
_WEIGHTS = re.compile(
    r"README\.md|config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


class OutputTensor(Protocol):
    """One tensor to write; a quantized tensor is stored as several arrays."""

    def outputs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Returns the type and shape of each array by name, in the order of storage."""


S = TypeVar("S", bound=OutputTensor)


def is_model_file(name: str) -> bool:
    """Returns whether `name` is the name of a model's file, or of a folder such as `1_Pooling`."""
    of_model = name in SMALL_FILES or any(p.fullmatch(name) for p in (_WEIGHTS, MODULE_FOLDER))
    return of_model or is_macos_file(name)


def into_shards(steps: Iterable[S], shard_bytes: int) -> list[list[S]]:
    """Groups tensors, in order, into shards of at most `shard_bytes` each.

    A tensor larger than `shard_bytes` is a shard by itself.
    """
    shards: list[list[S]] = []
    room = 0
    for step in steps:
        size = data_size(step.outputs())
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(step)
        room -= size
    return shards


@contextmanager
def new_model_folder(
    path: Path, overwrite: bool, source: Path, shards: Sequence[Sequence[OutputTensor]]
) -> Iterator[Path]:
    """Yields a new folder that has copies of the source's tokenizer and configuration files.

    Args:
        path: the final path, checked by `check_output_folder`; the folder moves there at the end.
        overwrite: whether to replace what is at `path`.
        source: the folder to copy these files from; links that lead out of it are refused.
        shards: the tensors that will be written; the disk must have room for them.

    Raises:
        UserError: there is too little disk space; `path` was made after it was checked, and
            `overwrite` is False; or a small file is too large, is not a regular file, or is a link
            that leads out of the source.
    """
    small = [source / name for name in SMALL_FILES if os.path.lexists(source / name)]
    for file in small:
        require_small(file)
    size = sum(data_size(step.outputs()) for shard in shards for step in shard)
    require_space(path, size + sum(file.stat().st_size for file in small) + (1 << 20))
    with new_folder(path, overwrite) as partial:
        for file in small:
            shutil.copyfile(file, partial / file.name)
        yield partial


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[S]],
    row_tiles: Callable[[S], Iterator[Mapping[str, mx.array]]],
    framework: str,
    label: str,
) -> None:
    """Writes every shard and the index, with a progress bar over the bytes written.

    Args:
        folder: the folder to write to.
        shards: the tensors to write, from `into_shards`.
        row_tiles: a function that reads a tensor a few rows at a time. It yields dictionaries
            with the next rows of each of the tensor's arrays, keyed by the array's name.
        framework: the `format` of the files' metadata: "mlx" or "pt".
        label: the progress bar's label.
    """
    weight_map: dict[str, str] = {}
    size = sum(data_size(step.outputs()) for shard in shards for step in shard)
    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1000, "disable": None}
    with _small_cache(), tqdm(total=size, desc=label, **options) as bar:
        for i, shard in enumerate(shards):
            number = f"-{i + 1:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            file_name = f"model{number}.safetensors"
            outputs = {name: form for step in shard for name, form in step.outputs().items()}
            with SafetensorsWriter(folder / file_name, outputs, {"format": framework}) as file:
                for step in shard:
                    for arrays in row_tiles(step):
                        for name, rows in arrays.items():
                            file.append(name, rows)
                            bar.update(rows.nbytes)
            weight_map |= dict.fromkeys(outputs, file_name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file in Hugging Face's format."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _small_cache() -> Iterator[None]:
    """Limits MLX's cache of freed buffers, in which buffers of many sizes would pile up."""
    before = mx.set_cache_limit(BLOCK_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        mx.clear_cache()
