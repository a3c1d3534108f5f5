"""Converts the protocol's dataclasses to plain maps and back, checking every field that it reads.

A dataclass becomes a map of its fields, keyed by name or by the `WIRE_KEY` of the field's metadata.
A member of a union of dataclasses carries a tag under "t": its class name in lower case, or its
`wire_tag`. Everything that a link receives or the journal reads passes through `from_plain`, so the
code behind it may rely on the declared types.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from engine.errors import FrameError
from engine.protocol import WIRE_KEY

TAG = "t"


def to_plain(kind: Any, value: Any) -> Any:
    """Return plain data for a value of `kind`, a dataclass or a union of dataclasses."""
    return _codec(kind).write(value)


def from_plain(kind: Any, data: Any) -> Any:
    """Return a value of `kind` built from plain data.

    Raises FrameError for a wrong type, an unknown field, a missing field or an unknown tag.
    """
    return _codec(kind).read(data)


class _Codec(NamedTuple):
    """The functions that write and read one type."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@cache
def _codec(kind: Any) -> _Codec:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _sequence(arguments[0])
    if origin is dict:
        return _mapping(arguments[1])
    if origin in {Union, types.UnionType}:
        members = tuple(member for member in arguments if member is not type(None))
        return _optional(members[0]) if len(members) == 1 else _tagged(members)
    return _scalar(kind)


def _dataclass(kind: Any) -> _Codec:
    hints = get_type_hints(kind)
    fields = [
        (field.metadata.get(WIRE_KEY, field.name), field.name, _codec(hints[field.name]))
        for field in dataclasses.fields(kind)
    ]
    by_key = {key: (name, codec) for key, name, codec in fields}

    def write(value: Any) -> dict[str, Any]:
        return {key: codec.write(getattr(value, name)) for key, name, codec in fields}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise FrameError(f"Expected a map for {kind.__name__}: {_shown(data)}")
        values = {}
        for key, item in data.items():
            if key not in by_key:
                raise FrameError(f"Unknown field of {kind.__name__}: {_shown(key)}")
            name, codec = by_key[key]
            try:
                values[name] = codec.read(item)
            except FrameError as error:
                raise FrameError(f"{key}: {error}") from None
        try:
            return kind(**values)
        except TypeError:
            raise FrameError(f"Missing field of {kind.__name__}: got {sorted(data)}") from None

    return _Codec(write, read)


def _tagged(members: tuple[Any, ...]) -> _Codec:
    tags = {member: getattr(member, "wire_tag", member.__name__.lower()) for member in members}
    codecs = {tag: _codec(member) for member, tag in tags.items()}

    def write(value: Any) -> dict[str, Any]:
        tag = tags[type(value)]
        return {TAG: tag, **codecs[tag].write(value)}

    def read(data: Any) -> Any:
        tag = data.get(TAG) if type(data) is dict else None
        codec = codecs.get(tag) if type(tag) is str else None
        if codec is None:
            raise FrameError(f"Expected one of {sorted(codecs)}: {_shown(tag)}")
        return codec.read({name: item for name, item in data.items() if name != TAG})

    return _Codec(write, read)


def _sequence(item: Any) -> _Codec:
    codec = _codec(item)

    def read(data: Any) -> tuple[Any, ...]:
        if type(data) is not list:
            raise FrameError(f"Expected a list: {_shown(data)}")
        return tuple([codec.read(value) for value in data])

    return _Codec(lambda value: [codec.write(each) for each in value], read)


def _mapping(item: Any) -> _Codec:
    codec = _codec(item)

    def read(data: Any) -> dict[str, Any]:
        if type(data) is not dict or not all(type(key) is str for key in data):
            raise FrameError(f"Expected a map: {_shown(data)}")
        return {key: codec.read(value) for key, value in data.items()}

    return _Codec(lambda value: {key: codec.write(each) for key, each in value.items()}, read)


def _optional(member: Any) -> _Codec:
    codec = _codec(member)
    return _Codec(
        lambda value: None if value is None else codec.write(value),
        lambda data: None if data is None else codec.read(data),
    )


def _literal(choices: tuple[str, ...]) -> _Codec:
    def read(data: Any) -> str:
        if type(data) is not str or data not in choices:
            raise FrameError(f"Expected one of {list(choices)}: {_shown(data)}")
        return data

    return _Codec(_unchanged, read)


def _scalar(kind: Any) -> _Codec:
    def read(data: Any) -> Any:
        if type(data) is not kind:  # exact: a bool is no int here
            raise FrameError(f"Expected {kind.__name__}: {_shown(data)}")
        return data

    return _Codec(_unchanged, _read_number if kind is float else read)


def _read_number(data: Any) -> float:
    if type(data) not in {int, float} or not math.isfinite(data):
        raise FrameError(f"Expected a finite number: {_shown(data)}")
    return float(data)


def _unchanged(value: Any) -> Any:
    return value


def _shown(data: Any) -> str:
    """Return enough of an unexpected value to recognise it in an error, never all of it."""
    if isinstance(data, str):
        return repr(data[:60])
    return repr(data) if isinstance(data, int | float | None) else type(data).__name__
