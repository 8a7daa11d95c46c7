"""A debug check of the indices that MLX reads and writes at, because MLX checks none.

On a CPU an index out of bounds reads other memory; on a GPU it may end the process,
or every later call fails. After `install`, each such call raises an error at once. The check waits
for the indices, so it is for rehearsals (`backend.REHEARSE`). Indices that are only
traced within `mx.compile` have no values yet, so only their axis is checked.
"""

from functools import wraps
from typing import Any

from mlx_t5.backend import mx

FUNCTIONS = [(mx, name) for name in ("take", "take_along_axis", "put_along_axis")]
FUNCTIONS += [(mx.array, name) for name in ("__getitem__", "__setitem__")]


def require_within(index: Any, size: int, call: str) -> None:
    """Raises `IndexError`, which names `call`, unless every index is in [-size, size)."""
    if not isinstance(index, mx.array) or index.dtype == mx.bool_ or index.size == 0:
        return
    if size == 0:
        raise IndexError(f"{call}: indices {index.shape} into an axis without entries")
    try:
        least, most = mx.min(index).item(), mx.max(index).item()
    except ValueError:  # within a function transformation; other errors are left to the caller
        return
    if least < -size or most >= size:
        raise IndexError(f"{call}: indices from {least} to {most} into an axis of {size}")


def install() -> None:
    """Makes MLX's functions with indices check them until `remove`."""
    remove()
    for owner, name in FUNCTIONS:
        check = _check_subscript if owner is mx.array else _check_along
        setattr(owner, name, _checked(getattr(owner, name), check))


def remove() -> None:
    """Removes the checks of indices."""
    for owner, name in FUNCTIONS:
        function = getattr(owner, name)
        setattr(owner, name, getattr(function, "__wrapped__", function))


def _checked(function: Any, check: Any) -> Any:
    @wraps(function)
    def checked(array: mx.array, index: Any, *rest: Any, **options: Any) -> Any:
        check(function.__name__, array, index, *rest, **options)
        return function(array, index, *rest, **options)

    return checked


def _check_along(call: str, array: mx.array, index: Any, *rest: Any, **options: Any) -> None:
    """Checks indices along the axis, the last argument; None means the flattened array."""
    axis = options.get("axis", rest[-1] if rest else None)
    require_within(index, array.size if axis is None else array.shape[axis], call)


def _check_subscript(call: str, array: mx.array, key: Any, *value: Any) -> None:
    """Checks the parts of a subscript up to an ellipsis; each part but None is one axis."""
    axis = 0
    for part in key if isinstance(key, tuple) else (key,):
        if part is Ellipsis or (isinstance(part, mx.array) and part.dtype == mx.bool_):
            return
        if part is not None:
            require_within(part, array.shape[axis], call)
            axis += 1
