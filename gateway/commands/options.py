"""Options that all commands take, and the database that they open."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from billing.database import Database
from gateway.clock import now_ms
from gateway.errors import CommandError
from gateway.ids import id_maker
from gateway.settings import Settings

DataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="DATA_DIR", help="Where this installation keeps data.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

DEFAULT_DATA_DIR = Path("var")
UNBOUNDED_WIDTH = 10_000

new_id = id_maker(now_ms)


@contextmanager
def open_database(data_dir: Path, *, may_be_damaged: bool = False) -> Iterator[Database]:
    """The migrated database of the installation in `data_dir`, closed on exit."""
    database = Database(Settings(data_dir=data_dir).ledger_url, now_ms=now_ms)
    try:
        database.require_migrated(may_be_damaged=may_be_damaged)
        yield database
    finally:
        database.close()


def print_json(value: object) -> None:
    """Print `value` as one JSON document."""
    typer.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose cells are never cut: ids wrap on a terminal, and not at all in a file."""
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED_WIDTH
    console.print(table)


def parse_instant(text: str | None) -> int | None:
    """Milliseconds since the epoch of an ISO date or time; without a zone it is UTC."""
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"Not a date like 2026-11-29 or 2026-11-29T12:00:00Z: {text}") from None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return round(instant.timestamp() * 1000)
