"""A debug check of the indices that MLX reads and writes at, as MLX checks none itself.

On a CPU an index out of bounds reads what lies beside the array; on a GPU it may end the process,
or every later call fails. `install` has each such call raise instead, where it was made. It waits
for the indices, so it is for tests and rehearsals (`backend.REHEARSE`). Indices that are only
described, within `mx.compile`, have no values yet: there the axis alone is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Restore = Callable[[], None]


def require_within(index: Any, size: int, call: str) -> None:
    """Raises `IndexError` unless every index is in [-size, size), as `call` names it."""
    if not isinstance(index, mx.array) or index.dtype == mx.bool_ or index.size == 0:
        return
    if size == 0:
        raise IndexError(f"{call}: indices {index.shape} into an axis without entries")
    try:
        least, most = mx.min(index).item(), mx.max(index).item()
    except (RuntimeError, ValueError):  # within a function transformation
        return
    if least < -size or most >= size:
        raise IndexError(f"{call}: indices from {least} to {most} into an axis of {size}")


def install() -> Restore:
    """Has the functions of MLX that take indices check them; returns what ends that."""
    named = {name: getattr(mx, name) for name in ("take", "take_along_axis", "put_along_axis")}
    subscripts = {name: getattr(mx.array, name) for name in ("__getitem__", "__setitem__")}

    def along(name: str) -> Callable[..., mx.array]:
        def checked(a: mx.array, indices: Any, *rest: Any, **options: Any) -> mx.array:
            axis = options["axis"] if "axis" in options else rest[-1] if rest else None
            require_within(indices, a.size if axis is None else a.shape[axis], name)
            return named[name](a, indices, *rest, **options)

        return checked

    def subscript(name: str) -> Callable[..., Any]:
        def checked(a: mx.array, key: Any, *value: Any) -> Any:
            _check_subscript(a, key, name)
            return subscripts[name](a, key, *value)

        return checked

    for name in named:
        setattr(mx, name, along(name))
    for name in subscripts:
        setattr(mx.array, name, subscript(name))

    def restore() -> None:
        for owner, functions in ((mx, named), (mx.array, subscripts)):
            for name, function in functions.items():
                setattr(owner, name, function)

    return restore


def _check_subscript(a: mx.array, key: Any, call: str) -> None:
    """Looks at the parts of a subscript up to an ellipsis; each takes one axis but None."""
    axis = 0
    for part in key if isinstance(key, tuple) else (key,):
        if part is Ellipsis or (isinstance(part, mx.array) and part.dtype == mx.bool_):
            return
        if part is not None:
            require_within(part, a.shape[axis], call)
            axis += 1
