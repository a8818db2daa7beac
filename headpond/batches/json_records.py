"""Strict conversion of frozen dataclasses to JSON and back.

It uses the standard library only: a trainer has no pydantic.
"""

import dataclasses
import json
import types
import typing
from functools import cache
from typing import Any, TypeVar

from headpond.errors import HeadpondError

Record = TypeVar("Record")


def dumps(record: Any) -> bytes:
    return json.dumps(record, default=_fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def loads(kind: type[Record], content: bytes) -> Record:
    """Raises ValueError if `content` is not exactly a `kind`."""
    try:
        return _build(kind, json.loads(content))
    except (TypeError, RecursionError, HeadpondError) as error:
        raise ValueError(str(error)) from error


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


_hints = cache(typing.get_type_hints)


def _build(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(value, dict) or not value.keys() <= hints.keys():
            raise ValueError(f"{value!r:.80} is not a {getattr(kind, '__name__', kind)}")
        fields: dict[str, Any] = {name: _build(hints[name], item) for name, item in value.items()}
        return typing.cast(Any, kind)(**fields)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # always `X | None` here
        return None if value is None else _build(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item) for item in typing.cast(list[Any], value))
    fits = (
        value in arguments if origin is typing.Literal else type(value) in ((int, float) if kind is float else (kind,))
    )
    if not fits:
        raise ValueError(f"{value!r:.80} is not a {kind}")
    return value
