"""`kvmeter report`: what was used and what it costs."""

import typer

app = typer.Typer(help="Reports.", no_args_is_help=True)


@app.callback()
def report() -> None:
    """Reports."""
