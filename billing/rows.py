"""Dataclasses as rows: a field is a column of its name, a list or a dict is JSON text.

So a column is named in its table and in its dataclass, and nowhere between them. The one exception
is NAMES_OUTSIDE.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin

from sqlalchemy import Row

from billing.errors import RowUnreadable

# Fields that have another name in tables, stored JSON and customers' JSON.
NAMES_OUTSIDE = {"num_tokens": "tokens"}


class DataclassInstance(Protocol):
    """Any dataclass, as the type checker sees it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=DataclassInstance)


def to_row(value: DataclassInstance, *, omit: Collection[str] = ()) -> dict[str, Any]:
    """Return a dataclass as the values of an INSERT, without the fields in `omit`."""
    return {
        _outside(field.name): _stored(getattr(value, field.name))
        for field in fields(value)
        if field.name not in omit
    }


def from_row(cls: type[T], row: Row[Any], **known: Any) -> T:
    """Return the dataclass that a row stores; the fields in `known` are not read from the row.

    Raises RowUnreadable.
    """
    read = {
        field.name: _loaded(field.type, getattr(row, _outside(field.name)), column=field.name)
        for field in fields(cls)
        if field.name not in known
    }
    return cls(**read, **known)


def to_json(values: Sequence[DataclassInstance]) -> str:
    """Return a short list of dataclasses as JSON text, stored beside the row that it explains."""
    return json.dumps([as_json(value) for value in values], separators=(",", ":"))


def from_json(cls: type[T], text: str, *, column: str) -> tuple[T, ...]:
    """Return the dataclasses that `to_json` stored in this column. Raises RowUnreadable."""
    names = {_outside(field.name): field.name for field in fields(cls)}
    try:
        return tuple(
            cls(**{names[key]: value for key, value in stored.items()})
            for stored in json.loads(text)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RowUnreadable(column, f"{error!r}") from error


def as_json(value: DataclassInstance) -> dict[str, Any]:
    """Return a dataclass as plain data, with the keys that the database and customers see."""
    return {_outside(field.name): _plain(getattr(value, field.name)) for field in fields(value)}


def _outside(name: str) -> str:
    return NAMES_OUTSIDE.get(name, name)


def _plain(value: Any) -> Any:
    return [as_json(item) for item in value] if isinstance(value, tuple) else value


def _stored(value: Any) -> Any:
    match value:
        case bool():  # STRICT tables and PostgreSQL have integers for it
            return int(value)
        case tuple():
            return to_json(value)
        case dict():
            return json.dumps(value, sort_keys=True)
    return value


def _loaded(annotation: Any, value: Any, *, column: str) -> Any:
    if annotation is bool:
        return bool(value)
    if get_origin(annotation) is tuple:
        return from_json(get_args(annotation)[0], value, column=column)
    if get_origin(annotation) is dict:
        return _loaded_dict(value, column=column)
    return value


def _loaded_dict(value: Any, *, column: str) -> dict[str, Any]:
    try:
        return dict(json.loads(value))
    except (ValueError, TypeError) as error:
        raise RowUnreadable(column, f"{error!r}") from error
