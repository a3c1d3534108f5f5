"""The server secret: one a database, from which every engine namespace is derived."""

import secrets
from functools import partial
from pathlib import Path

from billing.database import Database
from billing.owners import server_secret_of
from gateway.errors import ServerSecretError

SECRET_BYTES = 32


def load_server_secret(database: Database, *, older_file: Path) -> bytes:
    """Return the database's secret, made at the first start; several starts at once agree on one.

    A data folder of an older version has its secret in `older_file`; it becomes the database's.
    Raises ServerSecretError for such a file that was cut: an empty secret would still make
    namespaces.
    """
    proposed = secrets.token_bytes(SECRET_BYTES)
    if older_file.exists():
        proposed = older_file.read_bytes()
        if len(proposed) != SECRET_BYTES:
            problem = f"{len(proposed)} bytes instead of {SECRET_BYTES}"
            raise ServerSecretError(f"{older_file} is damaged ({problem}): restore or remove it")
    return database.write_now(partial(server_secret_of, proposed=proposed))
