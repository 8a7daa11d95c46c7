"""Reads the tensors of a state dict, and their positions, from torch's pickle without unpickling.

A pickle is a program, and unpickling an untrusted pickle runs the program. Here a small stack
machine reads the opcodes. It knows strings, numbers, containers and the few names from which a
tensor is built. The machine has no code path that imports or calls anything else. Any other
name is refused with an error that shows it.

A storage is a flat run of elements, and several tensors may be views of one storage.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlx_t5.checkpoints.limits import MAX_RANK, natural
from mlx_t5.errors import UserError, shown

# Files beyond these limits are refused. For comparison, t5-11b has a pickle of 60 kB with 20,000
# opcodes, names of 60 characters, and 60 kB for the archive's list of entries.
MAX_PICKLE = 1 << 21  # bytes of a pickle, and of an archive's list of entries
MAX_OPCODES = 1 << 18
MAX_HEAD = 1 << 10  # opcodes in each small pickle that precedes the object in a legacy file
_MAX_NAME = 1 << 10  # characters in a key; dictionaries compare their keys often
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
class Storage:
    """A flat run of elements: its key in the file, and the elements' type, size and number."""

    key: str
    dtype: str
    itemsize: int
    size: int  # elements


@dataclass(frozen=True)
class Tensor:
    """A tensor: a view of a storage, with offset and strides in elements."""

    storage: Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """A function or a storage class that a pickle may name.

    Attributes:
        call: our function that runs when the pickle calls this name; None for a storage class.
        storage: a storage class's element type and bytes per element; None for a function.
    """

    call: Callable[..., object] | None
    storage: tuple[str, int] | None = None


def _natural(values: tuple) -> tuple[int, ...]:
    if not natural(values):
        cause = f"that is no natural number, or more than {MAX_RANK} dimensions"
        raise UserError(f"damaged: a shape, stride or offset {cause}")
    return tuple(values)


def _rebuild_tensor(storage: object, offset: int, shape: tuple, strides: tuple, *_) -> Tensor:
    if type(storage) is not Storage or len(shape) != len(strides):
        raise UserError("damaged: a tensor without a storage or with strides that do not fit")
    return Tensor(storage, _natural((offset,))[0], _natural(shape), _natural(strides))


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
    """Refuses dictionary keys that are slow to hash: tuples, huge numbers, long texts."""
    if type(key) not in (str, int):
        raise UserError(f"damaged: a {type(key).__name__} as a dictionary key")
    if len(key) > _MAX_NAME if type(key) is str else key.bit_length() > 64:
        raise UserError("damaged: a dictionary key that is longer than any name")


class Machine:
    """Interprets one pickle from a stream, and leaves the stream at the pickle's end."""

    def __init__(self, stream: io.BytesIO, most: int = MAX_OPCODES):
        self._stream = stream
        self._most = most
        self._stack: list = []
        self._marks: list[int] = []  # stack positions where open groups begin
        self._memo: dict[int, object] = {}
        self.storages: dict[str, Storage] = {}

    def run(self) -> Any:
        """Returns the pickled object, made of literals, containers, `Storage` and `Tensor`."""
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
            stack.pop()  # the unneeded attributes of an OrderedDict (torch's `_metadata`)
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

    def _storage(self, identity: Any) -> Storage:
        kind, name, key, _, size, *view = identity
        if kind != "storage" or type(name) is not _Name or not name.storage or type(key) is not str:
            raise UserError("damaged: a persistent id that is no storage")
        _check_key(key)
        if any(view):
            raise UserError("its storages are views of others: save it with torch 1.0 or newer")
        storage = Storage(key, *name.storage, _natural((size,))[0])
        return self.storages.setdefault(key, storage)
