"""Column and constraint types that all tables share, and their naming convention.

On SQLite every table is STRICT, because a plain INTEGER column there accepts 0.5.
"""

from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, MetaData, Table, Text

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# A STRICT table has the type INTEGER (64 bits there) but not BIGINT.
Int64 = BigInteger().with_variant(Integer(), "sqlite")


def table(name: str, *parts: Any) -> Table:
    """Define a table of this schema."""
    return Table(name, metadata, *parts, sqlite_strict=True)


def text(name: str, *parts: Any, nullable: bool = False, primary_key: bool = False) -> Column[str]:
    """Return a text column; ids are text too."""
    return Column(name, Text, *parts, nullable=nullable, primary_key=primary_key)


def integer(
    name: str, *parts: Any, nullable: bool = False, primary_key: bool = False
) -> Column[int]:
    """Return a column of integers: money, tokens, or milliseconds."""
    return Column(
        name, Int64, *parts, nullable=nullable, primary_key=primary_key, autoincrement=False
    )


def one_of(column: str, *values: str) -> CheckConstraint:
    """Return a CHECK that the column holds one of these values."""
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


def not_negative(*columns: str) -> CheckConstraint:
    """Return a CHECK that none of these columns is below zero."""
    condition = " AND ".join(f"{column} >= 0" for column in columns)
    return CheckConstraint(condition, name="not_negative")
