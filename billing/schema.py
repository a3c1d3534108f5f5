"""The schema version: run missing migrations, refuse a database that is not at the newest."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from billing.errors import DatabaseNotMigrated, DatabaseUnreachable


def upgrade(conn: Connection) -> None:
    """Run the missing migrations in the caller's transaction, or none of them."""
    config = _config()
    config.attributes["connection"] = conn
    command.upgrade(config, "head")


def require_head(conn: Connection) -> None:
    """Raise DatabaseNotMigrated unless the database is at exactly the newest migration."""
    expected = ScriptDirectory.from_config(_config()).get_current_head()
    found = MigrationContext.configure(conn).get_current_revision()
    if found != expected:
        raise DatabaseNotMigrated(found=found, expected=str(expected))


@contextmanager
def one_migrator(database_path: str) -> Iterator[None]:
    """Hold the lock file beside a SQLite database; a second process blocks until it is free.

    SQLite's own lock is not enough: one of two processes that switch a new file to WAL fails.
    """
    path = f"{database_path}.migrate.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DatabaseUnreachable(path, str(error.strerror)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # and with it the lock


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
