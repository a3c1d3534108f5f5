"""`kvmeter workspaces`: creates workspaces, by which caches and reports are divided."""

from typing import Annotated

import typer

from billing import customers
from gateway.clock import now_ms
from gateway.commands.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    new_id,
    open_database,
    print_json,
)

app = typer.Typer(help="Workspaces: caches are never shared between them.", no_args_is_help=True)


@app.command()
def create(
    organization: Annotated[str, typer.Option(help="The organisation's id.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    name: Annotated[str, typer.Option(help="A name to recognise it by.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a workspace and print its id."""
    workspace_id = new_id("wrk")
    with open_database(data_dir) as database:
        database.write_now(
            lambda connection: customers.create_workspace(
                connection,
                id=workspace_id,
                organization_id=organization,
                name=name or workspace_id,
                now_ms=now_ms(),
            )
        )
    print_json({"id": workspace_id}) if as_json else typer.echo(workspace_id)
