"""`kvmeter up`: runs engine, gateway and ledger on one machine, fetching the model if needed."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer

from billing.database import Database, migrate
from gateway.clock import now_ms
from gateway.commands.first_keys import make_first_keys
from gateway.commands.models import fetch_default_model
from gateway.commands.options import DEFAULT_DATA_DIR, DataDir, new_id
from gateway.commands.process_lock import only_process
from gateway.commands.supervisor import STOP_SIGNALS, Child, run_children
from gateway.errors import CommandError
from gateway.http.http_server import listening
from gateway.settings import Settings
from gateway.shutdown import ENGINE_SECONDS, GATEWAY_SECONDS

READY_POLL_SECONDS = 0.1


def up(
    context: typer.Context,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    host: Annotated[str, typer.Option(envvar="HOST", help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PORT", help="Port to serve on.")] = 8080,
    model: Annotated[
        Path | None,
        typer.Option(envvar="KVMETER_MODEL", help="A model folder instead of the default model."),
    ] = None,
) -> None:
    """Serve: engine, gateway and ledger in one; further flags go to the engine.

    The first start fetches the model and makes the first keys. SIGTERM, Ctrl-C or the
    terminal's end drains.
    """
    for number in _stop_signals():
        signal.signal(number, lambda *_: sys.exit(0))  # until there is something to drain
    settings = Settings(data_dir=data_dir.absolute(), host=host, port=port)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with only_process(settings.data_dir, "up"):
        with listening(host, port):
            pass  # fail now, rather than after the model is loaded
        folder = model or fetch_default_model(settings.models_dir)
        migrate(settings.ledger_url)
        _make_first_keys(settings)
        problem = asyncio.run(_serve(settings, folder.absolute(), engine_flags=context.args))
    if problem:
        raise CommandError(f"{problem} before it served")


def _make_first_keys(settings: Settings) -> None:
    """Make the first keys if the database has none; show them once, on a terminal only."""
    database = Database(settings.ledger_url, now_ms=now_ms)
    try:
        keys = make_first_keys(database, settings.first_keys_path, new_id=new_id, now_ms=now_ms())
    finally:
        database.close()
    if keys is None:
        return
    typer.echo(f"Your first keys are in {settings.first_keys_path}")
    if sys.stdout.isatty():  # else it is a log, which must not have secrets
        typer.echo(
            f"  organization  {keys.organization_id}\n"
            f"  workspace     {keys.workspace_id}\n"
            f"  api key       {keys.api_key}\n"
            f"  admin key     {keys.admin_key}"
        )


async def _serve(settings: Settings, folder: Path, *, engine_flags: list[str]) -> str | None:
    """Run engine and gateway until a signal; None after a drain, else what went wrong."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _stop_signals():
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    kvmeter = [sys.executable, "-m", "gateway.commands"]
    shared = ["--data-dir", str(settings.data_dir), "--model", str(folder)]
    engine = Child(
        "engine",
        [sys.executable, "-m", "engine", *shared, "--listen", settings.link_url, *engine_flags],
        stop_seconds=ENGINE_SECONDS,
        say=_say,
    )
    gateway = Child(
        "gateway",
        [*kvmeter, "gateway", *shared, "--host", settings.host, "--port", str(settings.port)],
        stop_seconds=GATEWAY_SECONDS,
        say=_say,
    )
    try:
        return await run_children(
            [engine, gateway], ready=lambda: _announce(settings, folder.name), stop=stop
        )
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # we are on our way out


def _stop_signals() -> list[signal.Signals]:
    """The signals that drain us; the end of the terminal not if we were started to survive it."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    return [number for number in STOP_SIGNALS if not (number is signal.SIGHUP and is_kept)]


async def _announce(settings: Settings, model_id: str) -> None:
    """Wait until the gateway is ready; then print its address and a command to try."""
    url = f"http://{settings.host}:{settings.port}"
    async with httpx.AsyncClient(trust_env=False) as client:
        while not await _is_ready(client, url):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(READY_POLL_SECONDS)
    typer.echo(_curl_line(url, model_id, settings.first_keys_path))
    typer.echo(f"kvmeter ready: {url}")
    sys.stdout.flush()


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _curl_line(url: str, model_id: str, first_keys: Path) -> str:
    """A line to paste into a shell; it reads the key from its file, so that no log keeps it."""
    key = f"$(sed -n 's/.*\"api_key\": \"\\(.*\\)\".*/\\1/p' '{first_keys}')"
    body = {
        "model": model_id,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "What is gravity?"}],
    }
    return (
        f'Try: curl {url}/v1/messages -H "x-api-key: {key}" '
        f"-H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


def _say(sentence: str) -> None:
    typer.echo(f"kvmeter: {sentence}", err=True)
