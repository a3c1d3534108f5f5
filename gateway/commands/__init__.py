"""The `kvmeter` command: one file a noun, one sentence for every expected error."""

import sys

import typer
from billing.errors import BillingError

from gateway.commands import (
    engine,
    gateway,
    keys,
    ledger,
    migrate,
    models,
    organizations,
    report,
    up,
    workspaces,
)
from gateway.commands.options import CommandError

app = typer.Typer(
    name="kvmeter",
    help="A self-hosted LLM API that sells prompt caching honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up", context_settings=engine.PASS_THROUGH)(up.up)
app.command("gateway")(gateway.gateway)
app.command("engine", context_settings=engine.PASS_THROUGH)(engine.engine)
app.command("migrate")(migrate.migrate)
app.add_typer(organizations.app, name="organizations")
app.add_typer(workspaces.app, name="workspaces")
app.add_typer(keys.app, name="keys")
app.add_typer(report.app, name="report")
app.add_typer(ledger.app, name="ledger")
app.add_typer(models.app, name="models")


def main() -> None:
    """Run one command; an expected error ends it with one sentence and exit code 1."""
    try:
        app()
    except (CommandError, BillingError) as error:
        typer.echo(f"kvmeter: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        typer.echo(f"kvmeter: {error.strerror or error}{where}", err=True)
        sys.exit(1)
