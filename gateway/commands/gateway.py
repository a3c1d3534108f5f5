"""`kvmeter gateway`: where the gateway is put together from its parts."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from billing.database import Database
from billing.price_cards import default_cards_path, load_cards, publish

from engine.client import connect_engine
from gateway.clock import now_ms
from gateway.commands.options import DEFAULT_DATA_DIR, DataDir, open_database
from gateway.commands.pid_file import pid_file
from gateway.logs import configure_logging
from gateway.server import listening, stop_at_end_of_stdin
from gateway.settings import Settings

DRAIN_SECONDS = 10.0  # how long running requests may go on once we are told to stop


def gateway(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PORT", help="Port to serve on.")] = 8080,
    model: Annotated[
        Path | None,
        typer.Option(envvar="KVMETER_MODEL", help="The folder of the model that the engine runs."),
    ] = None,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run the gateway alone; KVMETER_ENGINE_URL says where its engine listens."""
    if until_stdin_closes:  # a terminal signals the whole group; the parent decides
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    settings = Settings(data_dir=data_dir, host=host, port=port, model=model)
    configure_logging(form=settings.log_format, level=settings.log_level)
    with open_database(settings) as database, listening(host, port) as listener:
        cards = load_cards(settings.price_cards or default_cards_path())
        database.write_now(lambda connection: publish(connection, cards, now_ms=now_ms()))
        with pid_file(settings.data_dir, "gateway"):
            uvloop.run(_run(settings, database, listener, parent_on_stdin=until_stdin_closes))


async def _run(
    settings: Settings, database: Database, listener: socket.socket, *, parent_on_stdin: bool
) -> None:
    """Wait for the engine, serve its model, and drain when told to stop."""
    stop = _stop_event(parent_on_stdin=parent_on_stdin)
    engine = connect_engine(settings.link_url)
    try:
        info = await engine.ready(ENGINE_START_SECONDS)
    finally:
        await engine.close()


def _stop_event(*, parent_on_stdin: bool) -> asyncio.Event:
    """An event that our parent sets by closing our stdin, or without a parent a signal."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if parent_on_stdin:
        stop_at_end_of_stdin(lambda: loop.call_soon_threadsafe(stop.set))
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    return stop
