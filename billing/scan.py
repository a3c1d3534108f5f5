"""Whole tables, read in bounded memory: scans a few rows at a time, and sums by key."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, Subquery, func, select

from billing.errors import RowUnreadable

ROWS_AT_ONCE = 200  # rows of one scan in memory: about 100 KB


def scan(conn: Connection, query: Select[Any]) -> Iterator[Row[Any]]:
    """Yield a query's rows, fetched ROWS_AT_ONCE at a time; a server-side cursor on PostgreSQL."""
    yield from conn.execute(query, execution_options={"yield_per": ROWS_AT_ONCE})


def each(
    rows: Iterable[Row[Any]],
    name: Callable[[Row[Any]], str],
    problems: Callable[[Row[Any]], Iterator[str]],
) -> Iterator[str]:
    """Yield the problems of each row; one that cannot be read is a problem too, under its name."""
    for row in rows:
        try:
            yield from problems(row)
        except (RowUnreadable, ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"{name(row)} cannot be read: {error}."


def sums_by(
    key: ColumnElement[str], value: ColumnElement[int], *conditions: ColumnElement[bool]
) -> Subquery:
    """Return a subquery with a row for each `key` and the `total` of its values."""
    sums = select(key.label("key"), func.sum(value).label("total")).where(*conditions)
    return sums.group_by(key).subquery()


def as_int(total: Any) -> int:
    """Return a sum as an integer: PostgreSQL's is NUMERIC, and NULL if nothing was joined."""
    return 0 if total is None else int(total)
