"""`kvmeter engine`: runs one engine process."""

import os
import sys

import typer

from gateway.commands.options import DEFAULT_DATA_DIR, DataDir

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
# The engine parses its own flags, `--help` among them: it alone knows them.
WITHOUT_HELP = {**PASS_THROUGH, "help_option_names": []}


def engine(context: typer.Context, data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Run one engine; every flag of `python -m engine` works here."""
    command = [sys.executable, "-m", "engine", "--data-dir", str(data_dir), *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - our own interpreter
