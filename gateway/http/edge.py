"""The outermost middleware: request ids, the access log, request counters, unexpected errors."""

import logging
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import logs
from gateway.errors import ResponseBrokenOff
from gateway.http.error_responses import error_response
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

OK = 200
MAX_LOGGED_PATH = 256  # characters: a line must not cost what a client likes
PROBES = ("/healthz", "/readyz", "/metrics")
CLIENT_CLOSED = 499  # nginx's code; for the log and the counters only


class Edge:
    """Pure ASGI, so that a stream passes through untouched.

    It sets `request.state.request_id`. A route's `request.state.log` goes into the access line.
    Response headers name the organisation and the workspace of `request.state.caller`, once known.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        now_ms: Callable[[], int],
        new_id: Callable[[str], str],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._now_ms = now_ms
        self._new_id = new_id
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; an unexpected error becomes a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, request_id=self._new_id("req"))
        bound = logs.request_id.set(exchange.request_id)
        started_ms = self._now_ms()
        try:
            await self._respond(exchange, receive)
        finally:
            level = logging.DEBUG if exchange.is_quiet_probe else logging.INFO
            log.log(level, "request", extra=exchange.log_fields(self._now_ms() - started_ms))
            self._metrics.requests.labels(exchange.route, str(exchange.status)).inc()
            logs.request_id.reset(bound)

    async def _respond(self, exchange: "_Exchange", receive: Receive) -> None:
        try:
            await self._app(exchange.scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_CLOSED
        except Exception as error:
            log.exception("request_failed")
            if exchange.started:
                # Only a broken connection shows the client that the response is incomplete.
                raise ResponseBrokenOff("The response failed after its start") from None
            response = error_response(error, request_id=exchange.request_id)
            await response(exchange.scope, receive, exchange.send)


class _Exchange:
    """One request and its response, watched as it leaves."""

    def __init__(self, scope: Scope, send: Send, *, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.started = False
        self.status = CLIENT_CLOSED  # until a response starts
        self._send = send
        self._state = scope.setdefault("state", {})
        self._state |= {"request_id": request_id, "log": {}}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers()]
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = {"request-id": self.request_id}
        caller = self._state.get("caller")
        if caller is not None:
            headers["anthropic-organization-id"] = caller.organization_id
            if caller.workspace_id is not None:
                headers["anthropic-workspace-id"] = caller.workspace_id
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    @property
    def route(self) -> str:
        """The route's template, so that ids in a path make no new label."""
        return getattr(self.scope.get("route"), "path", "none")

    @property
    def is_quiet_probe(self) -> bool:
        """A successful probe or scrape: one every few seconds."""
        return self.status == OK and self.route in PROBES

    def log_fields(self, duration_ms: int) -> dict[str, object]:
        fields: dict[str, object] = {
            "method": self.scope["method"],
            "path": self.scope["path"][:MAX_LOGGED_PATH],
            "status": self.status,
            "duration_ms": duration_ms,
        }
        caller = self._state.get("caller")
        if caller is not None:
            fields |= {"organization_id": caller.organization_id, "key_id": caller.key_id}
        fields |= self._state["log"]
        return fields
