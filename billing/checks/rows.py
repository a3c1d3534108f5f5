"""Rows under a check: one that cannot be read is a problem of its own, and the next one follows."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import Row

from billing.errors import RowUnreadable

Problems = Iterator[str]


def each(
    rows: Iterable[Row[Any]],
    name: Callable[[Row[Any]], str],
    problems: Callable[[Row[Any]], Problems],
) -> Problems:
    """Yield the problems of each row; `name` names one whose values are not what they should be."""
    for row in rows:
        try:
            yield from problems(row)
        except (RowUnreadable, ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"{name(row)} cannot be read: {error}."
