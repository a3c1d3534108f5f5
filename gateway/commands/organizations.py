"""`kvmeter organizations`: creates organisations and tops up their balances."""

import re
from decimal import Decimal, DecimalException
from typing import Annotated

import typer
from sqlalchemy.exc import DBAPIError

from billing import customers, ledger, money
from billing.database import Database
from billing.errors import WriterUnavailable
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

TOP_UP_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
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
    top_up_id: Annotated[
        str | None,
        typer.Option("--id", help="Your own id of this payment; the same id twice is one top-up."),
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Add money to a prepaid organisation's balance, once for each id."""
    amount_nanos = _parse_usd(usd)
    transfer_id = _checked_id(top_up_id) if top_up_id is not None else new_id("txn")
    with open_database(data_dir) as database:
        booked = _book(database, organization_id, amount_nanos, transfer_id)
    balance_usd = money.usd(booked.balance.credit_nanos)
    if as_json:
        print_json(
            {
                "id": transfer_id,
                "amount_nanos": str(amount_nanos),
                "repeated": booked.repeated,
                "balance_nanos": str(booked.balance.credit_nanos),
            }
        )
    elif booked.repeated:
        typer.echo(
            f"{transfer_id} was booked before, nothing was added:"
            f" {organization_id} has {balance_usd} USD."
        )
    else:
        typer.echo(f"{organization_id} has {balance_usd} USD now, {usd} more ({transfer_id}).")


def _book(
    database: Database, organization_id: str, amount_nanos: int, transfer_id: str
) -> ledger.TopUp:
    """Book the top-up; a failure of the database names the id with which to repeat it."""
    try:
        return database.write_now(
            lambda connection: ledger.top_up(
                connection,
                organization_id=organization_id,
                amount_nanos=amount_nanos,
                transfer_id=transfer_id,
                now_ms=now_ms(),
            )
        )
    except (DBAPIError, WriterUnavailable) as error:
        raise CommandError(
            f"The top-up may not be in the books: repeat it with --id {transfer_id}"
        ) from error


def _checked_id(top_up_id: str) -> str:
    if not TOP_UP_ID.fullmatch(top_up_id):
        raise CommandError(f"Not an id of 1 to 100 letters, digits and . _ : -: {top_up_id}")
    return top_up_id


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
