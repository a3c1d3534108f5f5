"""create_app: the routes, and what stands around them."""

from fastapi import FastAPI

from gateway import count_tokens, handlers, health, models
from gateway.edge import Edge
from gateway.parts import Parts


def create_app(parts: Parts) -> FastAPI:
    """The gateway as an ASGI application."""
    # No generated documentation: the routes read their bodies themselves, it would know nothing.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.parts = parts
    for router in (count_tokens.router, models.router, health.router):
        app.include_router(router)
    handlers.install(app)
    app.add_middleware(Edge, now_ms=parts.now_ms, new_id=parts.new_id, metrics=parts.metrics)
    return app
