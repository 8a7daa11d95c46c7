"""Reads the weights of a model folder; nothing in its files is executed.

safetensors are read by `mx.load`, which is lazy: an array's bytes are read when it is evaluated.
A torch `.bin` is read without torch. Its pickle may name nothing but the parts of a tensor, and
gives each tensor's place in the file, from which the tensor is read when it is needed. There are
two containers (torch/serialization.py):

- zip (torch >= 1.6): `<prefix>/data.pkl`, and each storage as the entry `<prefix>/data/<key>`;
- legacy: five pickles (magic number, protocol, system info, the state dict, the storages' keys),
  then for each key the number of elements (8 bytes) and the elements.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlx_t5.backend import mx
from mlx_t5.disk import SAFETENSORS, TORCH, read_object
from mlx_t5.errors import UserError, brief, reason
from mlx_t5.settings import DTYPES

# The embedding is stored under one or more of these names. MADLAD uses only the last one.
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LAST_NORMS = ("decoder.norm.weight", "encoder.norm.weight")  # in MLX folders
_LFS_POINTER = b"version https://git-lfs.github.com/"
# storage class in a pickle -> element type
_STORAGES = {
    "FloatStorage": mx.float32, "HalfStorage": mx.float16, "BFloat16Storage": mx.bfloat16,
    "DoubleStorage": mx.float64, "LongStorage": mx.int64, "IntStorage": mx.int32,
    "ShortStorage": mx.int16, "CharStorage": mx.int8, "ByteStorage": mx.uint8,
    "BoolStorage": mx.bool_,
}  # fmt: skip


@dataclass(eq=False)
class _Storage:
    dtype: mx.Dtype
    count: int
    start: int | None = None  # byte in the file; None until the container has told it

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.size


@dataclass(frozen=True)
class TorchTensor:
    """A tensor of a `.bin` file that has not been read; `offset` and `strides` count elements."""

    path: Path
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> mx.Dtype:
        return self.storage.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size

    def read(self) -> mx.array:
        if 0 in self.shape:
            return mx.zeros(self.shape, self.dtype)
        size, is_bfloat16 = self.dtype.size, self.dtype == mx.bfloat16
        try:
            start, count = self.storage.start or 0, self.storage.nbytes
            elements = np.memmap(self.path, np.uint8, "r", start, count)
            kind = np.dtype("<u2" if is_bfloat16 else type_name(self.dtype))
            strides = [stride * size for stride in self.strides]
            # numpy has no bfloat16, and checks shape, offset and strides against the buffer.
            view: Any = np.ndarray(self.shape, kind, elements, self.offset * size, strides)
        except (ValueError, TypeError, OverflowError, OSError) as error:
            cause = f"a tensor reaches beyond its storage ({reason(error)})"
            raise UserError(f"{self.path}: {cause}: fetch it again") from None
        array = mx.array(np.asarray(view, order="C"))
        return array.view(mx.bfloat16) if is_bfloat16 else array


Weights = dict[str, "mx.array | TorchTensor"]


def as_array(tensor: mx.array | TorchTensor) -> mx.array:
    return tensor.read() if isinstance(tensor, TorchTensor) else tensor


def read_weights(
    folder: str | Path, names: tuple[str, str] = (SAFETENSORS, TORCH)
) -> tuple[Weights, dict[str, str]]:
    """Opens the weights of a folder; prefers safetensors to `.bin`, and one file to shards.

    Args:
        folder: a folder with `model.safetensors`, `pytorch_model.bin`, or the index of either
            (`.index.json` after the name) and the shards that it names.
        names: file names to use in place of these two.

    Returns:
        The tensors by name, and the metadata of safetensors (MLX folders have `format`: `mlx`).
        Bytes are read when a tensor is evaluated: take tensors out one by one to save memory.

    Raises:
        UserError: weights are missing or damaged, or a pickle asks for more than tensors.
    """
    folder = Path(folder)
    for name in names:
        if (folder / name).is_file():
            return _read_file(folder / name)
        if (index := folder / f"{name}.index.json").is_file():
            return _read_shards(index)
    files = ", ".join(sorted(path.name for path in folder.glob("[!.]*"))) or "nothing"
    raise UserError(f"{folder}: no {' or '.join(names)}; it holds {brief(files, 200)}")


def stored_dtype(weights: Mapping[str, Any]) -> mx.Dtype | None:
    """The floating-point type in which a T5 is stored; None if no tensor shows it."""
    names = [name for name in EMBEDDINGS if name in weights]
    if names and names[0].replace(".weight", ".scales") in weights:
        names = [name for name in LAST_NORMS if name in weights]
    return weights[names[0]].dtype if names else None


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def require_float(name: str, tensor: mx.array | TorchTensor) -> None:
    if (dtype := type_name(tensor.dtype)) not in DTYPES:
        hint = " (as which MLX reads 8-bit floats, too)" if dtype == "uint8" else ""
        raise UserError(f"{brief(name)} is {dtype}{hint}; weights must be {', '.join(DTYPES)}")


def _read_shards(index: Path) -> tuple[Weights, dict[str, str]]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map: fetch it again")
    for file in weight_map.values():
        if type(file) is not str or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise UserError(f"{index} names {brief(file)!r}, which is not a file of its own folder")
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (index.parent / shard).is_file()]:
        cure = "fetch them"
        if index.name.startswith(SAFETENSORS) and any(index.parent.glob("pytorch_model*.bin")):
            cure += ", or delete the index to use the .bin files beside it"
        names = brief(", ".join(missing), 200)
        raise UserError(f"{index} names files that are missing: {names}; {cure}")
    weights: Weights = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        tensors, facts = _read_file(index.parent / shard)
        metadata |= facts
        weights |= {n: t for n, t in tensors.items() if weight_map.get(n, shard) == shard}
    for name, file in weight_map.items():
        if name not in weights:
            raise UserError(f"{index} puts {brief(name)} into {brief(file)}, which lacks it")
    return weights, metadata


def _read_file(path: Path) -> tuple[Weights, dict[str, str]]:
    try:
        with open(path, "rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(f"{path} is a Git LFS pointer; run `git lfs pull` in its folder")
        if path.suffix == ".safetensors":
            # By its name in the folder: MLX goes by the suffix, which a blob of the Hub's cache,
            # where the name may link to, does not have.
            return mx.load(str(path), return_metadata=True)
        return _read_torch(path), {}
    except UserError:
        raise
    except Exception as error:  # whatever a damaged header or pickle leads to
        cause = brief(reason(error), 200)
        raise UserError(f"{path} cannot be read ({cause}): fetch it again") from error


def _read_torch(path: Path) -> Weights:
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        state = _read_zip(file, path) if is_zip else _read_legacy(file, path)
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a state dict but a {type(state).__name__}")
    for name, value in state.items():
        if isinstance(value, dict):
            raise UserError(f"{path} has tensors under {brief(name)!r}; save that dict alone")
        if type(name) is not str or not isinstance(value, TorchTensor):
            raise UserError(f"{path}: {brief(name)!r} is a {type(value).__name__}, not a tensor")
        if value.storage.start is None:
            raise UserError(f"{path}: the bytes of {brief(name)} are missing: fetch it again")
    return dict(state)


def _read_zip(file: BinaryIO, path: Path) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise UserError(f"{path} is compressed, which torch never does")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise UserError(f"{path} is big-endian; save it on a little-endian machine")
        pickled = _TensorUnpickler(io.BytesIO(archive.read(entries["data.pkl"])), path)
        state = pickled.load()
    for key, storage in pickled.storages.items():
        if entry := entries.get(f"data/{key}"):
            # The data follows the local header, whose name and padding have their own lengths.
            file.seek(entry.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")
            storage.start = entry.header_offset + 30 + int(lengths.sum())
            if entry.file_size < storage.nbytes:
                raise UserError(f"{path}: storage {brief(key)} is cut short: fetch it again")
    return state


def _read_legacy(file: BinaryIO, path: Path) -> Any:
    magic, protocol = (_TensorUnpickler(file, path).load() for _ in range(2))
    if (magic, protocol) != (0x1950A86A20F9469CFC6C, 1001):
        raise UserError(f"{path} is not a torch checkpoint")
    if not _TensorUnpickler(file, path).load().get("little_endian", True):
        raise UserError(f"{path} is big-endian; save it on a little-endian machine")
    pickled = _TensorUnpickler(file, path)
    state = pickled.load()
    for key in _TensorUnpickler(file, path).load():
        storage = pickled.storages[key]
        if int.from_bytes(file.read(8), "little") != storage.count:
            raise UserError(f"{path}: storage {brief(key)} has another size: fetch it again")
        storage.start = file.tell()
        file.seek(storage.nbytes, io.SEEK_CUR)
    if file.tell() > path.stat().st_size:
        raise UserError(f"{path} is cut short: fetch it again")
    return state


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles tensors: a pickle can call only what `find_class` returns."""

    def __init__(self, file: Any, path: Path):
        super().__init__(file)
        self._path = path
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return name  # a text, which cannot be called
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._parameter
        name = brief(f"{module}.{name}")
        raise UserError(f"{self._path}: refused: the pickle asks for {name}, not part of a tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, name, key, _, count, *view = pid
        if kind != "storage" or any(view):
            raise UserError(f"{self._path} has views of storages; save it with torch 1.0 or newer")
        return self.storages.setdefault(key, _Storage(_STORAGES[name], count))

    # Methods, since a pickle could change the attributes of a function.
    def _tensor(self, storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Any:
        return TorchTensor(self._path, storage, offset, tuple(shape), tuple(strides))

    def _parameter(self, data: Any, *_: Any) -> Any:
        return data
