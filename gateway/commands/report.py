"""`kvmeter report`: tokens and money by meter, and the cost of leases."""

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from billing.booking import close_period, last_booked_at_ms
from billing.database import Database
from billing.lease_costs import pin_costs
from billing.meters import Meter
from billing.money import usd
from billing.reports import usage as report_usage
from gateway.clock import now_ms
from gateway.commands.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    open_database,
    parse_instant,
    print_json,
    print_table,
)

app = typer.Typer(help="Reports.", no_args_is_help=True)


class Dimension(StrEnum):
    """What a report can be grouped by."""

    ORGANIZATION = "organization"
    WORKSPACE = "workspace"
    KEY = "key"
    MODEL = "model"
    DAY = "day"


@app.command()
def usage(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    organization: Annotated[str | None, typer.Option(help="Only this organisation.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Requests booked at or after this ISO date (UTC).")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Requests booked before this ISO date (UTC).")
    ] = None,
    by: Annotated[
        list[Dimension] | None, typer.Option(help="A row for each of these; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens and money by meter.

    The report of a time that has passed is final: a request that ended in it and is booked later
    belongs to the day of its booking.
    """
    dimensions = tuple(dict.fromkeys(by or [Dimension.ORGANIZATION]))
    since_ms, until_ms = parse_instant(since), parse_instant(until)
    with open_database(data_dir) as database:
        if until_ms is not None and until_ms <= now_ms():
            _close_period(database, until_ms)
        rows = database.read_now(
            lambda connection: report_usage(
                connection,
                group_by=[dimension.value for dimension in dimensions],
                since_ms=since_ms,
                until_ms=until_ms,
                organization_id=organization,
            )
        )
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    print_table(
        [*dimensions, "requests", *Meter, "USD"],
        [
            [
                *(row.group[dimension] for dimension in dimensions),
                f"{row.num_requests:,}",
                *(f"{row.quantities[meter]:,}" for meter in Meter),
                usd(row.total_nanos),
            ]
            for row in rows
        ],
    )


def _close_period(database: Database, until_ms: int) -> None:
    """Let nothing be booked into the period any more, so that its report is final."""
    if database.read_now(last_booked_at_ms) < until_ms:
        database.write_now(lambda connection: close_period(connection, until_ms=until_ms))


@app.command()
def pins(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """What keeping cached prefixes has cost: KV blocks times time, idle and contended."""
    with open_database(data_dir) as database:
        costs = database.read_now(pin_costs)
    if as_json:
        print_json([asdict(cost) for cost in costs])
        return
    print_table(
        ["organization", "workspace", "model", "leases", "idle block-s", "contended block-s"],
        [
            [
                cost.organization_id,
                cost.workspace_id,
                cost.model_id,
                f"{cost.num_leases:,}",
                f"{cost.idle_block_ms // 1000:,}",
                f"{cost.contended_block_ms // 1000:,}",
            ]
            for cost in costs
        ],
    )
