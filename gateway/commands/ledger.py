"""`kvmeter ledger`: verifies the books."""

import typer

from billing.verification import verify as verify_ledger
from gateway.commands.options import DEFAULT_DATA_DIR, AsJson, DataDir, open_database, print_json

app = typer.Typer(help="The ledger.", no_args_is_help=True)


@app.command()
def verify(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """Check accounts, requests, prices and cache facts against each other; exit 1 on a problem."""
    with open_database(data_dir, may_be_damaged=True) as database:
        report = database.read_now(verify_ledger)
    if as_json:
        print_json(
            {
                "problems": list(report.problems),
                "row_counts": report.row_counts,
                "open_holds": [
                    {"request_id": hold.request_id, "owner_boot_id": hold.owner_boot_id}
                    for hold in report.open_holds
                ],
            }
        )
    else:
        for table, count in report.row_counts.items():
            typer.echo(f"{table}: {count:,}")
        for hold in report.open_holds:
            typer.echo(f"open hold: {hold.request_id}, opened by {hold.owner_boot_id}")
        for problem in report.problems:
            typer.echo(f"problem: {problem}")
        typer.echo(f"The ledger has {len(report.problems) or 'no'} problems.")
    if report.problems:
        raise typer.Exit(1)
