"""The HTTP server: serves an app on a bound socket, and drains at a stop."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from gateway.errors import CannotListen
from gateway.http.connection import HttpConnection
from gateway.shutdown import CONNECTIONS_SECONDS

BACKLOG = 1024
IDLE_SECONDS = 5  # between two requests of one connection


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on the address while the block runs. Raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise CannotListen(f"Cannot serve on {host}:{port}: {reason}") from error
    with listener:
        yield listener


async def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Serve until `stop`; then take no new connections, `drain`, and wait for the open ones."""
    server = _Server(
        uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",  # even if a websocket package is installed
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=CONNECTIONS_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await asyncio.gather(serving, drain())


def stop_at_end_of_stdin(stop: Callable[[], object]) -> None:
    """Call `stop` in a thread of its own when stdin ends: the parent closed it, or has died."""

    def wait() -> None:
        # Not sys.stdin: a thread that holds its lock at exit would crash the interpreter.
        while os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=wait, name="stdin", daemon=True).start()


class _Server(uvicorn.Server):
    """A server that leaves signals to its caller."""

    @override
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
