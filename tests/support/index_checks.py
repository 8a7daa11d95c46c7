"""A debug check of the indices that MLX reads and writes at, as MLX checks none itself.

On a CPU an index out of bounds reads what lies beside the array; on a GPU it may end the process,
or every later call fails. `install` has each such call raise instead, where it was made. It waits
for the indices, so it is for rehearsals (`backend.REHEARSE`). Indices that are only
described, within `mx.compile`, have no values yet: there the axis alone is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mlx_t5.backend import mx

FUNCTIONS = (
    *((mx, name) for name in ("take", "take_along_axis", "put_along_axis")),
    *((mx.array, name) for name in ("__getitem__", "__setitem__")),
)


def require_within(index: Any, size: int, call: str) -> None:
    """Raises `IndexError` unless every index is in [-size, size), as `call` names it."""
    if not isinstance(index, mx.array) or index.dtype == mx.bool_ or index.size == 0:
        return
    if size == 0:
        raise IndexError(f"{call}: indices {index.shape} into an axis without entries")
    try:
        least, most = mx.min(index).item(), mx.max(index).item()
    except ValueError:  # within a function transformation; other errors are the caller's
        return
    if least < -size or most >= size:
        raise IndexError(f"{call}: indices from {least} to {most} into an axis of {size}")


def install() -> None:
    """Has the functions of MLX that take indices check them, until `remove`."""
    remove()
    for owner, name in FUNCTIONS:
        check = _check_subscript if owner is mx.array else _check_along
        setattr(owner, name, _checked(getattr(owner, name), check))


def remove() -> None:
    """Has them check nothing."""
    for owner, name in FUNCTIONS:
        function = getattr(owner, name)
        setattr(owner, name, getattr(function, "__wrapped__", function))


def _checked(function: Callable, check: Callable[..., None]) -> Callable:
    @wraps(function)
    def checked(array: mx.array, index: Any, *rest: Any, **options: Any) -> Any:
        check(function.__name__, array, index, *rest, **options)
        return function(array, index, *rest, **options)

    return checked


def _check_along(call: str, array: mx.array, index: Any, *rest: Any, **options: Any) -> None:
    """Looks at indices along the axis, which is the last argument; None is all entries."""
    axis = options.get("axis", rest[-1] if rest else None)
    require_within(index, array.size if axis is None else array.shape[axis], call)


def _check_subscript(call: str, array: mx.array, key: Any, *value: Any) -> None:
    """Looks at the parts of a subscript up to an ellipsis; each takes one axis but None."""
    axis = 0
    for part in key if isinstance(key, tuple) else (key,):
        if part is Ellipsis or (isinstance(part, mx.array) and part.dtype == mx.bool_):
            return
        if part is not None:
            require_within(part, array.shape[axis], call)
            axis += 1
