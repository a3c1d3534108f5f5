"""`kvmeter gateway`: composes and runs one gateway process."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from billing.booking import last_booked_at_ms
from billing.database import Database
from billing.price_cards import default_cards_path, load_cards, publish
from engine.client import EngineClient, EngineInfo, EngineLost, connect_engine
from gateway.app import create_app
from gateway.background.entry_sweep import sweeping
from gateway.background.ledger_check import check_ledger
from gateway.background.ownership import register_gateway
from gateway.clock import now_ms
from gateway.commands.full_disk import writing_in
from gateway.commands.options import DEFAULT_DATA_DIR, DataDir, new_id, open_database
from gateway.commands.process_lock import instance_id, only_process
from gateway.commands.server_secret import load_server_secret
from gateway.dependencies import Dependencies
from gateway.errors import CommandError
from gateway.http.http_server import listening, serve, stop_at_end_of_stdin
from gateway.logs import configure_logging
from gateway.prompts.model_catalog import Catalog, ServedModel, read_model
from gateway.requests.open_requests import OpenRequests
from gateway.settings import Settings
from gateway.shutdown import RUNNING_SECONDS

ENGINE_WAIT_SECONDS = 0.5  # between two checks of the stop event


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
    with (
        writing_in(data_dir),
        only_process(data_dir, "gateway"),
        open_database(data_dir) as database,
        listening(host, port) as listener,
    ):
        cards = load_cards(settings.price_cards or default_cards_path())
        # A wall clock that stepped back while no gateway ran: what is booked has happened.
        now_ms.advance_to(database.read_now(last_booked_at_ms))
        database.write_now(lambda connection: publish(connection, cards, now_ms()))
        uvloop.run(_run(settings, database, listener, parent_on_stdin=until_stdin_closes))


async def _run(
    settings: Settings, database: Database, listener: socket.socket, *, parent_on_stdin: bool
) -> None:
    """Wait for the engine, serve its model, and drain at the stop event.

    Raises OtherEngine, or CommandError if another gateway took this one for dead.
    """
    stop = _stop_event(parent_on_stdin=parent_on_stdin)
    engine = connect_engine(settings.link_url)
    try:
        info = await _first_info(engine, stop)
        if info is None:
            return
        deps = Dependencies(
            settings=settings,
            engine=engine,
            database=database,
            catalog=Catalog([_model(settings, info)]),
            secret=load_server_secret(database, older_file=settings.server_secret_path),
            boot_id=new_id("gw"),
            now_ms=now_ms,
            new_id=new_id,
        )
        await register_gateway(
            deps, instance_id=instance_id(settings.data_dir), engine_id=info.engine_id
        )
        if problem := await check_ledger(deps):
            typer.echo(f"kvmeter gateway: {problem}", err=True)
        app = create_app(deps)
        open_requests: OpenRequests = app.state.open_requests
        fencing = asyncio.create_task(_set_after(open_requests.fenced, stop))
        async with sweeping(deps):
            await serve(
                app,
                listener,
                stop=stop,
                drain=lambda: open_requests.drain(RUNNING_SECONDS),
            )
        fencing.cancel()
        if open_requests.fenced.is_set():
            raise CommandError("Another gateway took this one for dead: it must start anew")
    finally:
        await engine.close()


async def _set_after(first: asyncio.Event, then: asyncio.Event) -> None:
    await first.wait()
    then.set()


async def _first_info(engine: EngineClient, stop: asyncio.Event) -> EngineInfo | None:
    """Wait until the engine has loaded its model; None if the stop comes first."""
    while not stop.is_set():
        with contextlib.suppress(EngineLost):
            return await engine.ready(ENGINE_WAIT_SECONDS)
    return None


def _model(settings: Settings, info: EngineInfo) -> ServedModel:
    folder = settings.model or settings.models_dir / info.model_id
    return read_model(folder, info, min_cache_tokens=settings.cache_min_tokens)


def _stop_event(*, parent_on_stdin: bool) -> asyncio.Event:
    """Return an event that the parent sets by closing stdin; without a parent, a signal sets it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if parent_on_stdin:
        stop_at_end_of_stdin(lambda: loop.call_soon_threadsafe(stop.set))
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    return stop
