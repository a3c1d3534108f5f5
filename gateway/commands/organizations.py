"""`kvmeter organizations`: creates organisations and tops up their balances."""

from decimal import Decimal, DecimalException
from typing import Annotated

import typer

from billing import customers, ledger
from gateway.clock import now_ms
from gateway.commands.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    new_id,
    open_database,
    print_json,
)
from gateway.errors import CommandError

app = typer.Typer(help="Organisations: who pays.", no_args_is_help=True)

NANOS_PER_USD = 1_000_000_000
USD_MAX = 1_000_000_000  # of one top-up; keeps a few of them inside 64 bits of nano-dollars


@app.command()
def create(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    name: Annotated[str, typer.Option(help="A name to recognise it by.")] = "",
    prepaid: Annotated[
        bool, typer.Option("--prepaid", help="It pays first: no request beyond its balance.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create an organisation and print its id."""
    organization_id = new_id("org")
    with open_database(data_dir) as database:
        database.write_now(
            lambda connection: customers.create_organization(
                connection,
                id=organization_id,
                name=name or organization_id,
                mode="prepaid" if prepaid else "postpaid",
                now_ms=now_ms(),
            )
        )
    print_json({"id": organization_id}) if as_json else typer.echo(organization_id)


@app.command("top-up")
def top_up(
    organization_id: Annotated[str, typer.Argument(help="The organisation's id.")],
    usd: Annotated[str, typer.Option(help="Amount in US dollars, for example 5.00.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Add money to an organisation's balance."""
    amount_nanos = _parse_usd(usd)
    transfer_id = new_id("txn")
    with open_database(data_dir) as database:
        database.write_now(
            lambda connection: ledger.top_up(
                connection,
                organization_id=organization_id,
                amount_nanos=amount_nanos,
                transfer_id=transfer_id,
                now_ms=now_ms(),
            )
        )
    if as_json:
        print_json({"id": transfer_id, "amount_nanos": str(amount_nanos)})
    else:
        typer.echo(f"{organization_id} has {usd} USD more ({transfer_id}).")


def _parse_usd(text: str) -> int:
    """A positive amount of dollars as whole nano-dollars."""
    try:
        nanos = Decimal(text) * NANOS_PER_USD
    except DecimalException:
        raise CommandError(f"Not an amount in dollars: {text}") from None
    if not nanos.is_finite() or nanos <= 0 or nanos != nanos.to_integral_value():
        raise CommandError(f"Not a positive amount in whole nano-dollars: {text}")
    if nanos > USD_MAX * NANOS_PER_USD:
        raise CommandError(f"More than {USD_MAX:,} dollars at once: {text}")
    return int(nanos)
