"""Where the tensors of a torch `.bin` file lie, found without torch and without unpickling.

A `.bin` is a pickle, which is a program, and running one from the internet runs whatever it says.
Here the opcodes are read by a small stack machine that knows strings, numbers, containers and the
handful of names a tensor is made of; there is no code path by which it could import or call
anything else. Any other name is refused, by name.

Two containers exist (torch/serialization.py in the torch sources):

- zip (torch >= 1.6): `<prefix>/data.pkl`, and each storage as an uncompressed entry
  `<prefix>/data/<key>`;
- legacy: five pickles (magic number, protocol, system info, the object, the list of storage keys),
  then for each key an 8-byte element count and the storage's bytes.

A storage is a flat run of elements, and several tensors may be views of one.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_t5.checkpoints.stored_tensor import MAX_RANK, MAX_TENSORS, StoredTensor, natural
from mlx_t5.errors import UserError, shown

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
# What t5-11b needs: a pickle of 60 kB with 20,000 opcodes, names of 60 characters, an archive's
# list of 60 kB. More is refused before it is worked on.
_MAX_PICKLE = 1 << 21  # bytes, also of an archive's list of entries
_MAX_OPCODES = 1 << 18
_MAX_HEAD = 1 << 10  # opcodes of the small pickles before the object of a legacy file
_MAX_NAME = 1 << 10  # characters; a dictionary compares its keys again and again
_MAX_ARGUMENTS = 16

# storage class in the pickle -> (element type, bytes an element)
_STORAGES = MappingProxyType(
    {
        "FloatStorage": ("float32", 4),
        "HalfStorage": ("float16", 2),
        "BFloat16Storage": ("bfloat16", 2),
        "DoubleStorage": ("float64", 8),
        "LongStorage": ("int64", 8),
        "IntStorage": ("int32", 4),
        "ShortStorage": ("int16", 2),
        "CharStorage": ("int8", 1),
        "ByteStorage": ("uint8", 1),
        "BoolStorage": ("bool", 1),
    }
)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str
    itemsize: int
    size: int  # elements


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch(path: Path) -> list[StoredTensor]:
    """The tensors of a state dict saved by torch, zip or legacy, in the order it lists them.

    Args:
        path: the file; its pickle is interpreted, the tensors' bytes are not read.

    Raises:
        UserError: the pickle names something that is no part of a tensor (nothing is executed), or
            the file is damaged or no state dict.
    """
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        found, places = _read_zip(path) if is_zip else _read_legacy(path)
        return [_place(path, name, tensor, places) for name, tensor in found.items()]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        cause = f"not a whole torch checkpoint ({shown(str(error))})"
        raise UserError(f"{path}: {cause}: fetch it again") from error


def _read_zip(path: Path) -> tuple[dict[str, _Tensor], dict[str, tuple[int, int]]]:
    """Returns the state dict, and by storage key the start and the number of its bytes."""
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
            if entries[roots[0]].file_size > _MAX_PICKLE:
                raise UserError("its data.pkl is too large for a list of tensors")
            state = _Machine(io.BytesIO(archive.read(roots[0]))).run()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise UserError(f"damaged archive ({error}): fetch it again") from error
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
    # The local header repeats the name and has an extra field of its own length (torch aligns the
    # data with it), so the data's position is in no central directory.
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise UserError(f"damaged archive: {shown(info.filename)} is not where it should be")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + lengths


def _read_legacy(path: Path) -> tuple[dict[str, _Tensor], dict[str, tuple[int, int]]]:
    """As `_read_zip`; the storages follow the pickles, each after its element count."""
    with open(path, "rb") as file:
        head = io.BytesIO(file.read(_MAX_PICKLE))
        if _Machine(head, _MAX_HEAD).run() != _MAGIC:
            raise UserError("not a torch checkpoint: the magic number is missing")
        if _Machine(head, _MAX_HEAD).run() != _PROTOCOL:
            raise UserError(f"not a torch checkpoint of protocol {_PROTOCOL}")
        if not _Machine(head, _MAX_HEAD).run().get("little_endian", True):
            raise UserError("its numbers are big-endian; save it on a little-endian machine")
        machine = _Machine(head)
        state = _state_dict(machine.run())
        keys = _Machine(head).run()
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


def _state_dict(state: object) -> dict[str, _Tensor]:
    if type(state) is not dict:
        raise UserError(f"not a state dict but a {type(state).__name__}")
    if len(state) > MAX_TENSORS:
        raise UserError(f"not a state dict of a T5: more than {MAX_TENSORS} tensors")
    for name, value in state.items():
        if type(name) is not str or type(value) is not _Tensor:
            found = f"{shown(name)!r} is a {type(value).__name__}, not a tensor"
            raise UserError(f"not a state dict: {found}")
    return state


def _place(
    path: Path, name: str, tensor: _Tensor, places: dict[str, tuple[int, int]]
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
    # More elements than the storage has would be one element shown many times: no weight is that,
    # and it lets a small file ask for any amount of memory.
    if max(tensor.offset + result.extent, result.size) > held:
        raise UserError(f"{shown(name)} reaches beyond its storage of {held} elements")
    return result


class _Archive(io.FileIO):
    """A file for `zipfile`, which reads the list of entries at once, however long it is."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MAX_PICKLE:
            raise UserError("its list of entries is too large for a list of tensors")
        return super().read(size)


@dataclass(frozen=True)
class _Name:
    """A name the pickle mentions; `call` is what stands in for it, None for a storage class."""

    call: Callable[..., object] | None
    storage: tuple[str, int] | None = None


def _natural(values: tuple) -> tuple[int, ...]:
    if not natural(values):
        cause = f"that is no natural number, or more than {MAX_RANK} dimensions"
        raise UserError(f"damaged: a shape, stride or offset {cause}")
    return tuple(values)


def _rebuild_tensor(storage: object, offset: int, shape: tuple, strides: tuple, *_) -> _Tensor:
    if type(storage) is not _Storage or len(shape) != len(strides):
        raise UserError("damaged: a tensor without a storage or with strides that do not fit")
    return _Tensor(storage, _natural((offset,))[0], _natural(shape), _natural(strides))


_NAMES = MappingProxyType(
    {
        "collections OrderedDict": _Name(lambda: {}),
        "torch._utils _rebuild_tensor_v2": _Name(_rebuild_tensor),
        "torch._utils _rebuild_parameter": _Name(lambda data, *_: data),
        **{f"torch {name}": _Name(None, facts) for name, facts in _STORAGES.items()},
    }
)
_CONSTANTS = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINSTRING SHORT_BINSTRING".split()
)
_CONTAINERS = MappingProxyType({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple})


def _check_key(key: Any) -> None:
    """Refuses keys that take long to hash or to compare: nested tuples, huge numbers and texts."""
    if type(key) not in (str, int):
        raise UserError(f"damaged: a {type(key).__name__} as a dictionary key")
    if len(key) > _MAX_NAME if type(key) is str else key.bit_length() > 64:
        raise UserError("damaged: a dictionary key of more than any name's length")


class _Machine:
    """Interprets one pickle from a stream and leaves the stream right behind it."""

    def __init__(self, stream: io.BytesIO, most: int = _MAX_OPCODES):
        self._stream = stream
        self._most = most
        self._stack: list = []
        self._marks: list[int] = []  # where on the stack each open group begins
        self._memo: dict[int, object] = {}
        self.storages: dict[str, _Storage] = {}

    def run(self) -> Any:
        """Returns the object: plain containers, `_Storage` and `_Tensor`."""
        for n, (opcode, argument, _) in enumerate(pickletools.genops(self._stream)):
            if n == self._most:
                raise UserError(f"its pickle has more than {n} opcodes; no list of tensors has")
            self._step(opcode.name, argument)
        return self._stack.pop()

    def _step(self, op: str, argument: Any) -> None:
        stack = self._stack
        if op in _LITERALS:
            stack.append(argument)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _CONTAINERS:
            stack.append(_CONTAINERS[op]())
        elif op in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif op in ("GLOBAL", "STACK_GLOBAL"):
            self._name(argument)
        elif op == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif op == "REDUCE":
            self._reduce()
        elif op == "BUILD":
            stack.pop()  # attributes of an OrderedDict (torch's `_metadata`): nothing we need
        elif op not in ("PROTO", "FRAME", "STOP"):
            self._container_step(op)

    def _container_step(self, op: str) -> None:
        stack = self._stack
        if op == "MARK":
            self._marks.append(len(stack))
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            values = [stack.pop() for _ in range(int(op[-1]))]
            stack.append(tuple(reversed(values)))
        elif op == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif op in ("APPEND", "APPENDS"):
            values = self._since_mark() if op == "APPENDS" else [stack.pop()]
            list.extend(stack[-1], values)
        elif op in ("SETITEM", "SETITEMS"):
            values = self._since_mark() if op == "SETITEMS" else [stack.pop(-2), stack.pop()]
            for key, value in zip(values[::2], values[1::2], strict=True):
                _check_key(key)
                dict.__setitem__(stack[-1], key, value)
        else:
            raise UserError(f"refused: the pickle uses {op}, which no state dict needs")

    def _since_mark(self) -> list:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _name(self, argument: str | None) -> None:
        if argument is None:
            attribute, module = self._stack.pop(), self._stack.pop()
            argument = " ".join((module, attribute))
        if argument not in _NAMES:
            name = shown(argument.replace(" ", ".", 1))
            raise UserError(f"refused: the pickle asks for {name}, which is no part of a tensor")
        self._stack.append(_NAMES[argument])

    def _reduce(self) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if type(name) is not _Name or name.call is None or type(arguments) is not tuple:
            raise UserError("refused: the pickle calls something that is no tensor constructor")
        if len(arguments) > _MAX_ARGUMENTS:
            raise UserError("damaged: a tensor constructor with too many arguments")
        self._stack.append(name.call(*arguments))

    def _storage(self, identity: Any) -> _Storage:
        kind, name, key, _, size, *view = identity
        if kind != "storage" or type(name) is not _Name or not name.storage or type(key) is not str:
            raise UserError("damaged: a persistent id that is no storage")
        _check_key(key)
        if any(view):
            raise UserError("its storages are views of others: save it with torch 1.0 or newer")
        storage = _Storage(key, *name.storage, _natural((size,))[0])
        return self.storages.setdefault(key, storage)
