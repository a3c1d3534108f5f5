"""The outermost layer: every request gets an id, every response carries it, every end is logged."""

import logging
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import logs
from gateway.errors import ResponseBrokenOff, error_body, shape_of
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

OK = 200
PROBES = ("/healthz", "/readyz", "/metrics")
CLIENT_GONE = 499  # for the log and the counters only: nobody is there to read it


class Edge:
    """Pure ASGI, so that a stream passes through untouched.

    Into `request.state` it puts `request_id`; what a route puts into `request.state.log` goes into
    the access line. Of `request.state.caller`, once known, it tells the client organisation and
    workspace.
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
        """Answer one request, whatever happens inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, request_id=self._new_id("req"))
        bound = logs.request_id.set(exchange.request_id)
        started_ms = self._now_ms()
        try:
            await self._answer(exchange, receive)
        finally:
            level = logging.DEBUG if exchange.is_quiet_probe else logging.INFO
            log.log(level, "request", extra=exchange.log_fields(self._now_ms() - started_ms))
            self._metrics.requests.labels(exchange.route, str(exchange.status)).inc()
            logs.request_id.reset(bound)

    async def _answer(self, exchange: "_Exchange", receive: Receive) -> None:
        try:
            await self._app(exchange.scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_GONE
        except Exception as error:
            log.exception("request_failed")
            if exchange.started:
                # Only a broken connection tells the client that this is not the whole answer.
                raise ResponseBrokenOff("The response failed after its start") from None
            body = error_body(error, request_id=exchange.request_id)
            response = JSONResponse(body.model_dump(), status_code=shape_of(error).status)
            await response(exchange.scope, receive, exchange.send)


class _Exchange:
    """One request and its response, watched as it leaves."""

    def __init__(self, scope: Scope, send: Send, *, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.started = False
        self.status = CLIENT_GONE  # until a response starts
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
        """A probe or scrape that found what it expects: one every few seconds, for ever."""
        return self.status == OK and self.route in PROBES

    def log_fields(self, duration_ms: int) -> dict[str, object]:
        fields: dict[str, object] = {
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "duration_ms": duration_ms,
        }
        caller = self._state.get("caller")
        if caller is not None:
            fields |= {"organization_id": caller.organization_id, "key_id": caller.key_id}
        fields |= self._state["log"]
        return fields
