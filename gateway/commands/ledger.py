"""`kvmeter ledger`: do the books agree with themselves."""

from dataclasses import asdict

import typer
from billing.verification import verify as verify_ledger

from gateway.commands.options import DEFAULT_DATA_DIR, AsJson, DataDir, open_database, print_json

app = typer.Typer(help="The ledger.", no_args_is_help=True)


@app.command()
def verify(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """Check every account, request, price and cache fact against the others; exit 1 on a fault."""
    with open_database(data_dir) as database:
        report = database.read_now(verify_ledger)
    if as_json:
        print_json(asdict(report))
    else:
        for name, count in report.counts.items():
            typer.echo(f"{name.replace('_', ' ')}: {count}")
        for problem in report.problems:
            typer.echo(f"problem: {problem}")
        typer.echo(f"The ledger has {len(report.problems) or 'no'} problems.")
    if report.problems:
        raise typer.Exit(1)
