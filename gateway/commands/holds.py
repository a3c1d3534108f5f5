"""`kvmeter holds`: shows open holds, and closes by hand one that stays open."""

import asyncio
import getpass
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from billing.decisions import decision_on, release_by_operator, settle_by_operator
from billing.facts import EngineFacts, GrantFact
from billing.holds import HoldRow, hold_row, open_hold_rows
from billing.money import usd
from billing.rows import as_json as plain
from billing.settlement import CutBy, Settlement
from engine.client import EngineLost, EngineRecord, connect_engine
from gateway.clock import now_ms
from gateway.commands.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    open_database,
    print_json,
    print_table,
)
from gateway.errors import CommandError
from gateway.requests.usage import engine_facts
from gateway.settings import Settings

app = typer.Typer(
    help="Holds: money reserved for requests that have not ended.", no_args_is_help=True
)

ENGINE_WAIT_SECONDS = 2.0

RequestId = Annotated[str, typer.Argument(help="The request's id.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the request.")]
Force = Annotated[bool, typer.Option("--force", help="Also while the hold's gateway runs.")]
Actor = Annotated[str | None, typer.Option(help="Who decides; by default who runs this command.")]


@app.command("list")
def list_holds(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """List the open holds, oldest first; requests in progress are among them."""
    with open_database(data_dir) as database:
        rows = database.read_now(open_hold_rows)
    if as_json:
        print_json([_row_as_json(row) for row in rows])
        return
    print_table(
        ["request", "organization", "model", "open for", "reserved USD", "gateway"],
        [
            [
                row["request_id"],
                row["organization_id"],
                row["model_id"],
                f"{(now_ms() - row['started_at_ms']) // 1000:,} s",
                usd(row["amount_nanos"]),
                row["owner_boot_id"],
            ]
            for row in rows
        ],
    )


@app.command()
def show(
    request_id: RequestId, data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """Show a hold, the engine's record of its request, and the decision on it if there was one."""
    with open_database(data_dir) as database:
        row = database.read_now(lambda connection: hold_row(connection, request_id))
        decision = database.read_now(lambda connection: decision_on(connection, request_id))
    shown = {
        **_row_as_json(row),
        "engine_record": _recorded(data_dir, request_id),
        "decision": None if decision is None else asdict(decision),
    }
    if as_json:
        print_json(shown)
        return
    for name, value in shown.items():
        typer.echo(f"{name}: {json.dumps(value) if isinstance(value, dict) else value}")


@app.command()
def settle(
    request_id: RequestId,
    reason: Reason,
    cut_by: Annotated[
        CutBy | None, typer.Option(help="Which side cut the output: what we cut is free.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="A JSON file of the engine's record, as `show --json` prints it."),
    ] = None,
    actor: Actor = None,
    force: Force = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Close an open hold by the engine's record, charged as any request that ended so.

    Without --record the engine is asked for it.
    """
    facts = _read_facts(record) if record is not None else _ask_engine(data_dir, request_id)
    with open_database(data_dir) as database:
        settlement = database.write_now(
            lambda connection: settle_by_operator(
                connection,
                request_id=request_id,
                facts=facts,
                cut_by=cut_by,
                actor=_actor(actor),
                reason=_checked_reason(reason),
                now_ms=now_ms(),
                force=force,
            )
        )
    _print_settlement(settlement, as_json=as_json)


@app.command()
def release(
    request_id: RequestId,
    reason: Reason,
    actor: Actor = None,
    force: Force = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Close an open hold without a charge, and give the reserved money back."""
    with open_database(data_dir) as database:
        settlement = database.write_now(
            lambda connection: release_by_operator(
                connection,
                request_id=request_id,
                actor=_actor(actor),
                reason=_checked_reason(reason),
                now_ms=now_ms(),
                force=force,
            )
        )
    _print_settlement(settlement, as_json=as_json)


def _row_as_json(row: HoldRow) -> dict[str, Any]:
    """The stored columns; money as text, so that no reader rounds it."""
    return {**row, "amount_nanos": str(row["amount_nanos"])}


def _print_settlement(settlement: Settlement, *, as_json: bool) -> None:
    record = settlement.record
    if as_json:
        print_json(
            {
                "request_id": record.request_id,
                "status": record.status,
                "charged_nanos": str(record.charged_nanos),
            }
        )
    else:
        charged = usd(record.charged_nanos)
        typer.echo(f"{record.request_id} is closed: {record.status}, {charged} USD charged.")


def _actor(named: str | None) -> str:
    actor = getpass.getuser() if named is None else named.strip()
    if not actor:
        raise CommandError("An actor cannot be empty: say who decides")
    return actor


def _checked_reason(reason: str) -> str:
    if not reason.strip():
        raise CommandError("A reason cannot be empty: say why this hold is closed by hand")
    return reason.strip()


def _read_facts(path: Path) -> EngineFacts:
    """The engine's record in a JSON file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["grants"] = tuple(_grant(grant) for grant in stored["grants"])
        return EngineFacts(**stored)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(f"Not an engine record: {path}: {error}") from error


def _grant(stored: dict[str, Any]) -> GrantFact:
    return GrantFact(num_tokens=stored.pop("tokens"), **stored)


def _ask_engine(data_dir: Path, request_id: str) -> EngineFacts:
    try:
        record = asyncio.run(_look_up(Settings(data_dir=data_dir).link_url, request_id))
    except EngineLost as error:
        raise CommandError(
            f"The engine does not answer ({error}): give its record by --record"
        ) from error
    if record is None:
        raise CommandError(f"The engine has no record of an ended request: {request_id}")
    return engine_facts(record)


def _recorded(data_dir: Path, request_id: str) -> dict[str, Any] | str:
    """The engine's record as plain data, or in words why there is none."""
    try:
        return plain(_ask_engine(data_dir, request_id))
    except CommandError as error:
        return str(error)


async def _look_up(link_url: str, request_id: str) -> EngineRecord | None:
    engine = connect_engine(link_url)
    try:
        await engine.ready(ENGINE_WAIT_SECONDS)
        return (await engine.lookup([request_id])).get(request_id)
    finally:
        await engine.close()
