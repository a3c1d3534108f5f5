"""Organisations, workspaces and API keys; of a secret only its hash and a prefix are stored."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, insert, select, update

from billing import accounts as names
from billing.errors import UnknownKey, UnknownOrganization, UnknownWorkspace
from billing.ledger import open_accounts
from billing.rows import from_row, to_row
from billing.tables import api_keys, organizations, workspaces

Mode = Literal["postpaid", "prepaid"]
KeyKind = Literal["customer", "admin"]

SECRET_PREFIX_CHARACTERS = 12  # tells keys apart in a list, and is too short to help guess one


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a valid secret. A customer key always has a workspace, an admin key never."""

    key_id: str
    organization_id: str
    workspace_id: str | None
    kind: KeyKind
    mode: Mode


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret."""

    id: str
    organization_id: str
    workspace_id: str | None
    name: str
    kind: KeyKind
    secret_prefix: str
    created_at_ms: int
    revoked_at_ms: int | None


def any_organization(conn: Connection) -> bool:
    """Return whether the database has an organisation."""
    return conn.scalar(select(organizations.c.id).limit(1)) is not None


def create_organization(conn: Connection, *, id: str, name: str, mode: Mode, now_ms: int) -> None:
    """Create an organisation with its accounts and its default workspace."""
    conn.execute(insert(organizations).values(id=id, name=name, mode=mode, created_at_ms=now_ms))
    open_accounts(conn, names.OUR_ACCOUNTS, None)
    open_accounts(conn, names.of_organization(id), id)
    create_workspace(
        conn, id=default_workspace_id(id), organization_id=id, name="default", now_ms=now_ms
    )


def default_workspace_id(organization_id: str) -> str:
    """Return the id of the workspace that every organisation has from its creation."""
    return "wrk_" + organization_id.removeprefix("org_")


def create_workspace(
    conn: Connection, *, id: str, organization_id: str, name: str, now_ms: int
) -> None:
    """Create a workspace; two workspaces never share a cache. Raises UnknownOrganization."""
    _require_organization(conn, organization_id)
    conn.execute(
        insert(workspaces).values(
            id=id, organization_id=organization_id, name=name, created_at_ms=now_ms
        )
    )


def create_key(
    conn: Connection,
    *,
    id: str,
    secret: str,
    organization_id: str,
    workspace_id: str | None = None,
    name: str,
    kind: KeyKind,
    now_ms: int,
) -> ApiKey:
    """Create a key; a customer key without a workspace gets the organisation's default one.

    Raises UnknownOrganization or UnknownWorkspace.
    """
    _require_organization(conn, organization_id)
    if kind == "admin":
        workspace_id = None
    elif workspace_id is None:
        workspace_id = default_workspace_id(organization_id)
    else:
        _require_workspace(conn, workspace_id, organization_id)
    key = ApiKey(
        id=id,
        organization_id=organization_id,
        workspace_id=workspace_id,
        name=name,
        kind=kind,
        secret_prefix=secret[:SECRET_PREFIX_CHARACTERS],
        created_at_ms=now_ms,
        revoked_at_ms=None,
    )
    conn.execute(insert(api_keys).values(**to_row(key), secret_hash=_hash(secret)))
    return key


def list_keys(conn: Connection, *, organization_id: str | None = None) -> list[ApiKey]:
    """Return all keys, or one organisation's, oldest first, revoked keys included."""
    query = select(api_keys).order_by(api_keys.c.created_at_ms, api_keys.c.id)
    if organization_id is not None:
        query = query.where(api_keys.c.organization_id == organization_id)
    return [from_row(ApiKey, row) for row in conn.execute(query)]


def revoke_key(conn: Connection, *, id: str, now_ms: int) -> None:
    """Revoke a key at once; a second call keeps the first time. Raises UnknownKey."""
    if conn.scalar(select(api_keys.c.id).where(api_keys.c.id == id)) is None:
        raise UnknownKey(id)
    conn.execute(
        update(api_keys)
        .where(api_keys.c.id == id, api_keys.c.revoked_at_ms.is_(None))
        .values(revoked_at_ms=now_ms)
    )


def find_caller(conn: Connection, secret: str) -> Caller | None:
    """Return the owner of a secret, or None if the secret is unknown or revoked.

    Secrets are long and random. So a fast hash (SHA-256) cannot be searched, and the time of the
    lookup reveals nothing.
    """
    row = conn.execute(
        select(api_keys, organizations.c.mode)
        .join(organizations, organizations.c.id == api_keys.c.organization_id)
        .where(api_keys.c.secret_hash == _hash(secret), api_keys.c.revoked_at_ms.is_(None))
    ).one_or_none()
    if row is None:
        return None
    return Caller(row.id, row.organization_id, row.workspace_id, row.kind, row.mode)


def _require_organization(conn: Connection, organization_id: str) -> None:
    query = select(organizations.c.id).where(organizations.c.id == organization_id)
    if conn.scalar(query) is None:
        raise UnknownOrganization(organization_id)


def _require_workspace(conn: Connection, workspace_id: str, organization_id: str) -> None:
    query = select(workspaces.c.id).where(
        workspaces.c.id == workspace_id, workspaces.c.organization_id == organization_id
    )
    if conn.scalar(query) is None:
        raise UnknownWorkspace(workspace_id, organization_id=organization_id)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
