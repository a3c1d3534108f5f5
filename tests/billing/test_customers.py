"""Organisations, workspaces and keys."""

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from billing import accounts, customers
from billing.customers import Caller, create_key, create_organization, create_workspace, find_caller
from billing.database import Database
from billing.errors import UnknownKey, UnknownOrganization, UnknownWorkspace
from billing.ledger import trial_balance
from billing.tables import api_keys

SECRET = "kvm-0123456789abcdef"


@pytest.fixture
def ready(database: Database) -> Database:
    def write(conn):
        create_organization(conn, id="org_1", name="One", mode="prepaid", now_ms=1)
        create_organization(conn, id="org_2", name="Two", mode="postpaid", now_ms=2)
        create_workspace(conn, id="wrk_own", organization_id="org_1", name="own", now_ms=3)
        create_key(conn, id="key_1", secret=SECRET, organization_id="org_1",
                   workspace_id="wrk_own", name="laptop", kind="customer", now_ms=4)  # fmt: skip

    database.write_now(write)
    return database


def test_a_secret_finds_its_caller(ready: Database) -> None:
    caller = ready.read_now(lambda conn: find_caller(conn, SECRET))

    assert caller == Caller("key_1", "org_1", "wrk_own", "customer", "prepaid")
    assert ready.read_now(lambda conn: find_caller(conn, SECRET + "x")) is None


def test_only_a_hash_and_a_prefix_of_a_secret_are_kept(ready: Database) -> None:
    (row,) = ready.read_now(lambda conn: conn.execute(select(api_keys)).all())

    assert SECRET not in map(str, row)
    assert row.secret_prefix == SECRET[:12]


def test_a_revoked_key_finds_nobody_and_stays_listed(ready: Database) -> None:
    for now_ms in (10, 20):
        ready.write_now(lambda conn, at=now_ms: customers.revoke_key(conn, id="key_1", now_ms=at))

    assert ready.read_now(lambda conn: find_caller(conn, SECRET)) is None
    (key,) = ready.read_now(customers.list_keys)
    assert key.revoked_at_ms == 10


def test_an_organization_lists_its_own_keys(ready: Database) -> None:
    def keys_of(organization_id: str) -> list[str]:
        keys = ready.read_now(
            lambda conn: customers.list_keys(conn, organization_id=organization_id)
        )
        return [key.id for key in keys]

    assert (keys_of("org_1"), keys_of("org_2")) == (["key_1"], [])


def test_a_new_organization_has_its_accounts_and_a_default_workspace(ready: Database) -> None:
    ids = {account.account_id for account in ready.read_now(trial_balance)}
    assert ids == {
        *accounts.OUR_ACCOUNTS,
        *accounts.of_organization("org_1"),
        *accounts.of_organization("org_2"),
    }

    key = ready.write_now(
        lambda conn: create_key(
            conn, id="key_2", secret="other", organization_id="org_2", name="ci",
            kind="customer", now_ms=5,
        )
    )  # fmt: skip
    assert key.workspace_id == customers.default_workspace_id("org_2")


def test_an_admin_key_has_no_workspace(ready: Database) -> None:
    key = ready.write_now(
        lambda conn: create_key(
            conn, id="key_3", secret="root", organization_id="org_1", workspace_id="wrk_own",
            name="admin", kind="admin", now_ms=5,
        )
    )  # fmt: skip
    assert key.workspace_id is None
    assert [k.id for k in ready.read_now(customers.list_keys)] == ["key_1", "key_3"]


def test_what_does_not_exist_is_named(ready: Database) -> None:
    with pytest.raises(UnknownOrganization, match="org_9"):
        ready.write_now(
            lambda conn: create_workspace(conn, id="w", organization_id="org_9", name="", now_ms=1)
        )
    with pytest.raises(UnknownWorkspace, match="wrk_own"):
        ready.write_now(
            lambda conn: create_key(
                conn, id="k", secret="s", organization_id="org_2", workspace_id="wrk_own",
                name="", kind="customer", now_ms=1,
            )
        )  # fmt: skip
    with pytest.raises(UnknownKey, match="key_9"):
        ready.write_now(lambda conn: customers.revoke_key(conn, id="key_9", now_ms=1))


def test_a_secret_belongs_to_one_key(ready: Database) -> None:
    with pytest.raises(IntegrityError, match="secret_hash"):
        ready.write_now(
            lambda conn: create_key(
                conn, id="key_4", secret=SECRET, organization_id="org_1", name="", kind="admin",
                now_ms=1,
            )
        )  # fmt: skip
