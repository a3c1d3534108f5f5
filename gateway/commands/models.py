"""`kvmeter models`: fetches model folders."""

import subprocess
import sys
from pathlib import Path

import typer

from gateway.commands.options import DEFAULT_DATA_DIR, DataDir
from gateway.errors import CommandError
from gateway.settings import Settings

app = typer.Typer(help="Models.", no_args_is_help=True)


@app.command()
def fetch(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Fetch and convert the default model, unless it is there, and print its folder."""
    typer.echo(fetch_default_model(Settings(data_dir=data_dir).models_dir))


def fetch_default_model(models_dir: Path) -> Path:
    """The default model's folder, fetched if need be; progress goes to stderr.

    Converting needs torch, which this process does without: the engine's own command does it.
    """
    command = [sys.executable, "-m", "engine.model_files.default_model", str(models_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise CommandError("The default model is not there; see the line above")
    return Path(done.stdout.strip())
