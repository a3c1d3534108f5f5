"""`kvmeter migrate`: brings the database to the newest schema."""

import typer

from billing.database import migrate as migrate_database
from gateway.commands.full_disk import writing_in
from gateway.commands.options import DEFAULT_DATA_DIR, DataDir
from gateway.settings import Settings


def migrate(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Bring the database to the newest schema; safe to run twice, and at the same time."""
    with writing_in(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        migrate_database(Settings(data_dir=data_dir).ledger_url)
    typer.echo("The database has the newest schema.")
