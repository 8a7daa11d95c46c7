"""What ranks send each other: JSON, whose values are checked before anything is made of them."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from mlx_t5.errors import UserError

HUGE = 3e38  # no number that ranks send is as large; a float32 can still hold it


@dataclass(frozen=True)
class Codec:
    """How outcomes travel.

    Attributes:
        packed: makes JSON of an outcome.
        unpacked: makes an outcome of JSON; raises ValueError if it is none.
    """

    packed: Callable[[Any], Any]
    unpacked: Callable[[Any], Any]


def packed_item(item: Any) -> Any:
    """JSON of what a line holds: a text, a pair, or what is wrong with it."""
    return {"error": str(item)} if isinstance(item, Exception) else item


def unpacked_item(value: Any) -> Any:
    """The opposite.

    Raises:
        ValueError: it is none of the three.
    """
    if isinstance(value, dict):
        return UserError(of_kind(str, value.get("error")))
    if isinstance(value, list) and len(value) == 2:
        return tuple(of_kind(list[str], value))
    return of_kind(str, value)


def of_kind(kind: Any, value: Any) -> Any:
    """A value of JSON as a value of a type: a dataclass, a list, a union, or a plain one.

    Numbers are finite.

    Raises:
        ValueError: it is of another type.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        names = {each.name for each in fields(kind)}
        if isinstance(value, dict) and value.keys() == names:
            hints = get_type_hints(kind)
            return kind(**{name: of_kind(hints[name], value[name]) for name in names})
    elif get_origin(kind) is list:
        if isinstance(value, list):
            return [of_kind(get_args(kind)[0], each) for each in value]
    elif get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            try:
                return of_kind(each, value)
            except ValueError:
                continue
    elif kind is float and type(value) in (int, float):
        if abs(value) < HUGE:  # no NaN either, of which no output can be made
            return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{kind} was expected")


def fingerprint(value: Any) -> str:
    """A short name of settings, which others share only if they are equal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def difference(ours: Mapping[str, str], theirs: Any) -> str | None:
    """Names what two ranks disagree about; None if they have the same job."""
    if not isinstance(theirs, dict):
        return "job"
    return next((name for name, value in ours.items() if theirs.get(name) != value), None)
