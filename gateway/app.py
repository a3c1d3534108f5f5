"""`create_app`: the ASGI application, composed of routes, middleware and background tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from gateway.background.lease_reports import recording_lease_costs
from gateway.background.ownership import keeping_ownership
from gateway.background.recovery import keep_recovering
from gateway.dependencies import Dependencies
from gateway.http import error_responses
from gateway.http.connection_limits import ConnectionLimits
from gateway.http.edge import Edge
from gateway.requests.open_requests import OpenRequests
from gateway.routes import count_tokens, health, messages, models, request_records


def create_app(deps: Dependencies) -> FastAPI:
    """The gateway as an ASGI application.

    Drain `app.state.open_requests` before stopping the server: by itself the server waits for every
    stream to end.
    """
    open_requests = OpenRequests(deps)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        recovering = asyncio.create_task(keep_recovering(deps, open_requests), name="recovery")
        async with keeping_ownership(deps, open_requests), recording_lease_costs(deps):
            yield
            await open_requests.drain(0)
        recovering.cancel()

    # No generated documentation: the routes read their bodies themselves, it would know nothing.
    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.deps = deps
    app.state.open_requests = open_requests
    app.state.connection_limits = ConnectionLimits(
        max_total=deps.settings.max_connections,
        max_per_address=deps.settings.max_connections_per_address,
    )
    for module in (messages, count_tokens, models, request_records, health):
        app.include_router(module.router)
    error_responses.install(app)
    app.add_middleware(Edge, now_ms=deps.now_ms, new_id=deps.new_id, metrics=deps.metrics)
    return app
