"""The `kvmeter` command: one file a subcommand, one sentence for every expected error."""

import sys

import typer
from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from billing.errors import BillingError
from engine.client import AddressError
from gateway.commands import (
    bench,
    engine,
    gateway,
    holds,
    keys,
    ledger,
    migrate,
    models,
    organizations,
    report,
    up,
    workspaces,
)
from gateway.errors import OperatorError
from gateway.settings import variable_of

app = typer.Typer(
    name="kvmeter",
    help="A self-hosted LLM API that sells prompt caching honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up", context_settings=engine.PASS_THROUGH)(up.up)
app.command("gateway")(gateway.gateway)
app.command("engine", context_settings=engine.WITHOUT_HELP)(engine.engine)
app.command("migrate")(migrate.migrate)
app.command("bench", help=bench.HELP, context_settings=engine.PASS_THROUGH)(bench.bench)
app.add_typer(organizations.app, name="organizations")
app.add_typer(workspaces.app, name="workspaces")
app.add_typer(keys.app, name="keys")
app.add_typer(report.app, name="report")
app.add_typer(ledger.app, name="ledger")
app.add_typer(holds.app, name="holds")
app.add_typer(models.app, name="models")

EXPECTED = (
    AddressError,
    BillingError,
    DBAPIError,
    OSError,
    OperatorError,
    UnicodeEncodeError,
    ValidationError,
)


def main() -> None:
    """Run one command; an expected error ends it with one sentence and exit code 1."""
    try:
        app()
    except EXPECTED as error:
        typer.echo(f"kvmeter: {_sentence(error)}", err=True)
        sys.exit(1)


def _sentence(error: Exception) -> str:
    """What the operator reads."""
    match error:
        case ValidationError():
            fault = error.errors()[0]
            return (
                f"Setting {variable_of(fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
            )
        case OSError(strerror=str(reason), filename=str(file)):
            return f"{reason}: {file}"
        case UnicodeEncodeError():
            return f"Not text in UTF-8: {error.object!r}"
        case DBAPIError():
            return f"The database cannot be used: {str(error.orig).splitlines()[0]}"
    return str(error)
