"""The first organisation and its keys: made once, kept in a file that only the operator can read.

The set is written to a draft file, then inserted, then the draft is renamed. After a crash the next
start inserts the draft again (without effect, if it was inserted) and renames it. So there is never
a second set, and never a valid key that was not written down.
"""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

from sqlalchemy import Connection

from billing import customers
from billing.database import Database

FILE_NAME = "first-keys.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstKeys:
    """What `first-keys.json` holds."""

    organization_id: str
    workspace_id: str
    api_key: str
    admin_key: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """The set in `path`. Raises ValueError if the file is torn or not such a set."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"Not a set of first keys: {path}") from error

    def write(self, path: Path) -> None:
        """Write the set, readable by its owner only, and wait until it is on disk."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # a draft may lie there with another mode
            file.write(json.dumps(asdict(self), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())


def make_first_keys(
    database: Database, path: Path, *, new_id: Callable[[str], str], now_ms: int
) -> FirstKeys | None:
    """Make the first set of keys and write it to `path`; None if the database has one.

    Once a database, not once a file: a file that was moved or deleted makes no second set, and the
    file of another database is replaced.
    """
    draft = path.with_name(f".{path.name}.draft")
    if not draft.exists() and database.read_now(customers.any_organization):
        return None
    keys = _drafted(draft, new_id)
    inserting = partial(_insert, keys=keys, new_id=new_id, now_ms=now_ms)
    if not database.write_now(inserting):
        draft.unlink()
        return None
    draft.replace(path)
    return keys


def new_secret(kind: customers.KeyKind) -> str:
    """Return a secret: a prefix for the kind of key, then 32 random bytes."""
    prefix = "kvma" if kind == "admin" else "kvm"
    return f"{prefix}-{secrets.token_urlsafe(32)}"


def _drafted(draft: Path, new_id: Callable[[str], str]) -> FirstKeys:
    """The set that an interrupted start drafted, or a new one; a torn draft was never inserted."""
    try:
        return FirstKeys.read(draft)
    except (FileNotFoundError, ValueError):
        organization_id = new_id("org")
        keys = FirstKeys(
            organization_id=organization_id,
            workspace_id=customers.default_workspace_id(organization_id),
            api_key=new_secret("customer"),
            admin_key=new_secret("admin"),
        )
        keys.write(draft)
        return keys


def _insert(
    connection: Connection, *, keys: FirstKeys, new_id: Callable[[str], str], now_ms: int
) -> bool:
    """Insert the set, unless an interrupted start did; False if the database has another one."""
    if customers.find_caller(connection, keys.api_key) is not None:
        return True
    if customers.any_organization(connection):
        return False
    customers.create_organization(
        connection, id=keys.organization_id, name="first", mode="postpaid", now_ms=now_ms
    )
    customers.create_key(
        connection,
        id=new_id("key"),
        secret=keys.api_key,
        organization_id=keys.organization_id,
        workspace_id=keys.workspace_id,
        name="first",
        kind="customer",
        now_ms=now_ms,
    )
    customers.create_key(
        connection,
        id=new_id("key"),
        secret=keys.admin_key,
        organization_id=keys.organization_id,
        workspace_id=None,
        name="first admin",
        kind="admin",
        now_ms=now_ms,
    )
    return True
