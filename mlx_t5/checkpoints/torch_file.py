"""Finds the tensors in a torch `.bin` file, without torch.

Two containers exist (torch/serialization.py in the torch sources):

- zip (torch >= 1.6): an archive with the pickle `<prefix>/data.pkl`, and with each storage as an
  uncompressed entry `<prefix>/data/<key>`;
- legacy: five pickles (magic number, protocol, system info, the object, the list of storage keys),
  then for each key an 8-byte element count and the storage's bytes.

torch_pickle.py reads the pickles without executing anything.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from mlx_t5.checkpoints.limits import MAX_TENSORS
from mlx_t5.checkpoints.stored_tensor import StoredTensor
from mlx_t5.checkpoints.torch_pickle import MAX_HEAD, MAX_PICKLE, Machine, Tensor
from mlx_t5.errors import UserError, reason, shown

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


def read_torch(path: Path) -> list[StoredTensor]:
    """Returns the tensors of a state dict saved by torch, in the order of the state dict.

    Args:
        path: the file. Its pickle is interpreted, and the tensors' bytes are not read.

    Raises:
        UserError: the pickle names an object that is not part of a tensor (nothing is executed), or
            the file is damaged or holds no state dict.
    """
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        tensors, places = _read_zip(path) if is_zip else _read_legacy(path)
        return [_place(path, name, tensor, places) for name, tensor in tensors.items()]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        cause = f"not a whole torch checkpoint ({shown(str(error))})"
        raise UserError(f"{path}: {cause}: fetch it again") from error


def _read_zip(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Returns a zip file's state dict, and each storage's position and size in bytes, by key."""
    try:
        with _Archive(path) as whole, zipfile.ZipFile(whole) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            roots = [name for name in entries if name.partition("/")[2] == "data.pkl"]
            if len(roots) != 1:
                raise UserError("not a torch checkpoint: the archive has no data.pkl")
            prefix = roots[0].removesuffix("data.pkl")
            for name, info in entries.items():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    cause = f"{shown(name)} is compressed or encrypted"
                    raise UserError(f"{cause}, which torch never writes")
            byteorder = entries.get(f"{prefix}byteorder")
            if byteorder and archive.open(byteorder).read(8) != b"little":
                raise UserError("its numbers are big-endian; save it on a little-endian machine")
            if entries[roots[0]].file_size > MAX_PICKLE:
                raise UserError("its data.pkl is too large for a list of tensors")
            state = Machine(io.BytesIO(archive.read(roots[0]))).run()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise UserError(f"damaged archive ({reason(error)}): fetch it again") from error
    places = {}
    size = path.stat().st_size
    with open(path, "rb") as file:
        for name, info in entries.items():
            if name.startswith(f"{prefix}data/"):
                start = _entry_start(file, info)
                if start + info.file_size > size:
                    cause = "lies beyond the end of the file: fetch it again"
                    raise UserError(f"{shown(name)} {cause}")
                places[name.removeprefix(f"{prefix}data/")] = (start, info.file_size)
    return _state_dict(state), places


def _entry_start(file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    # The data follows the entry's local header. Torch aligns the data by an extra field in this
    # header, and only the header itself says how long the field is.
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise UserError(f"damaged archive: {shown(info.filename)} is not where it should be")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + lengths


def _read_legacy(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Returns a legacy file's state dict, and each storage's position and size in bytes, by key."""
    with open(path, "rb") as file:
        head = io.BytesIO(file.read(MAX_PICKLE))
        if Machine(head, MAX_HEAD).run() != _MAGIC:
            raise UserError("not a torch checkpoint: the magic number is missing")
        if Machine(head, MAX_HEAD).run() != _PROTOCOL:
            raise UserError(f"not a torch checkpoint of protocol {_PROTOCOL}")
        if not Machine(head, MAX_HEAD).run().get("little_endian", True):
            raise UserError("its numbers are big-endian; save it on a little-endian machine")
        machine = Machine(head)
        state = _state_dict(machine.run())
        keys = Machine(head).run()
        position, end = head.tell(), path.stat().st_size
        places = {}
        for key in keys:
            if type(key) is not str or key not in machine.storages:
                raise UserError("damaged: its list of storages names one that no tensor has")
            storage = machine.storages[key]
            file.seek(position)
            count = int.from_bytes(file.read(8), "little")
            position += 8
            if count != storage.size or position + count * storage.itemsize > end:
                cause = "is cut short or has another size: fetch it again"
                raise UserError(f"storage {shown(key)} {cause}")
            places[key] = (position, count * storage.itemsize)
            position += count * storage.itemsize
    return state, places


def _state_dict(state: object) -> dict[str, Tensor]:
    if type(state) is not dict:
        raise UserError(f"not a state dict but a {type(state).__name__}")
    if len(state) > MAX_TENSORS:
        raise UserError(f"not a state dict of a T5: more than {MAX_TENSORS} tensors")
    for name, value in state.items():
        if type(name) is not str or type(value) is not Tensor:
            cause = f"{shown(name)!r} is a {type(value).__name__}, not a tensor"
            raise UserError(f"not a state dict: {cause}")
    return state


def _place(
    path: Path, name: str, tensor: Tensor, places: dict[str, tuple[int, int]]
) -> StoredTensor:
    storage = tensor.storage
    if storage.key not in places:
        where = f"{shown(name)} (storage {shown(storage.key)})"
        raise UserError(f"the bytes of {where} are missing: fetch it again")
    start, nbytes = places[storage.key]
    result = StoredTensor(
        name=name,
        path=path,
        dtype=storage.dtype,
        itemsize=storage.itemsize,
        shape=tensor.shape,
        strides=tensor.strides,
        offset=start + tensor.offset * storage.itemsize,
    )
    held = min(storage.size, nbytes // storage.itemsize)
    # A tensor that has more elements than its storage repeats some of them. No weight does that,
    # and such a tensor would let a small file demand any amount of memory.
    if max(tensor.offset + result.extent, result.size) > held:
        raise UserError(f"{shown(name)} reaches beyond its storage of {held} elements")
    return result


class _Archive(io.FileIO):
    """A file that refuses long reads, so that `zipfile` reads no huge list of entries."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_PICKLE:
            raise UserError("its list of entries is too large for a list of tensors")
        return super().read(size)
