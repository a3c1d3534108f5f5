"""`kvmeter keys`: creates, lists and revokes API keys."""

from dataclasses import asdict
from typing import Annotated

import typer

from billing import customers
from gateway.clock import now_ms
from gateway.commands.first_keys import new_secret
from gateway.commands.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    new_id,
    open_database,
    print_json,
    print_table,
)

app = typer.Typer(help="API keys; only their hashes are stored.", no_args_is_help=True)


@app.command()
def create(
    organization: Annotated[str, typer.Option(help="The organisation's id.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    workspace: Annotated[
        str | None, typer.Option(help="The workspace whose cache and reports it uses.")
    ] = None,
    name: Annotated[str, typer.Option(help="A name to recognise it by.")] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Reads the organisation's records; sends no messages.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a key and print its id and, this once, its secret."""
    kind: customers.KeyKind = "admin" if admin else "customer"
    key_id, secret = new_id("key"), new_secret(kind)
    with open_database(data_dir) as database:
        database.write_now(
            lambda connection: customers.create_key(
                connection,
                id=key_id,
                secret=secret,
                organization_id=organization,
                workspace_id=workspace,
                name=name or key_id,
                kind=kind,
                now_ms=now_ms(),
            )
        )
    if as_json:
        print_json({"id": key_id, "secret": secret})
    else:
        typer.echo(f"id:     {key_id}\nsecret: {secret}\nThe secret is not shown again.")


@app.command("list")
def list_keys(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    with open_database(data_dir) as database:
        keys = database.read_now(customers.list_keys)
    if as_json:
        print_json([asdict(key) for key in keys])
        return
    print_table(
        ["id", "kind", "organization", "workspace", "name", "secret", "state"],
        [
            [
                key.id,
                key.kind,
                key.organization_id,
                key.workspace_id or "",
                key.name,
                f"{key.secret_prefix}…",
                "active" if key.revoked_at_ms is None else "revoked",
            ]
            for key in keys
        ],
    )


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Revoke a key at once; requests in flight end as they would have."""
    with open_database(data_dir) as database:
        database.write_now(
            lambda connection: customers.revoke_key(connection, id=key_id, now_ms=now_ms())
        )
    typer.echo(f"{key_id} is revoked.")
