import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from gateway.errors import ResponseBrokenOff
from gateway.http.bodies import read_bytes
from gateway.http.body_bytes import BodyBytes
from gateway.http.edge import Edge
from gateway.ids import id_maker
from gateway.metrics import Metrics
from tests.gateway.bodies import body
from tests.gateway.front import HEADERS, KEY, NOW_MS, front

SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "headers": [],
    "scheme": "http",
    "server": ("gateway", 80),
    "client": ("127.0.0.1", 1),
    "root_path": "",
}


def app_of(endpoint: Any, metrics: Metrics) -> Starlette:
    edge = Middleware(Edge, now_ms=lambda: NOW_MS, new_id=id_maker(lambda: NOW_MS), metrics=metrics)
    return Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])], middleware=[edge])


def requests_of(metrics: Metrics, status: int) -> float | None:
    labels = {"route": "/", "status": str(status)}
    return metrics.registry.get_sample_value("kvmeter_requests_total", labels)


async def test_one_line_a_request_without_prompt_or_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "my deepest secret"
    counted = body(messages=[{"role": "user", "content": prompt}]) | {"colour": prompt}
    async with front(tmp_path) as gateway:
        with caplog.at_level(logging.DEBUG):
            await gateway.http.post("/v1/messages/count_tokens?x=y", json=counted, headers=HEADERS)

    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields = vars(line)
    assert fields["status"] == 400
    assert fields["path"] == "/v1/messages/count_tokens"
    assert fields["organization_id"] == "org_1"
    assert prompt not in str(fields)
    assert not any(value == KEY for value in fields.values())


async def test_an_error_in_the_middle_of_a_response_breaks_it_off() -> None:
    async def half() -> Any:
        yield "half"
        raise RuntimeError("the other half")

    async def endpoint(request: Request) -> StreamingResponse:
        return StreamingResponse(half())

    metrics = Metrics()
    transport = httpx.ASGITransport(app_of(endpoint, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        with pytest.raises(ResponseBrokenOff):
            await http.get("/")


async def test_a_client_that_goes_away_while_it_sends_is_counted_as_gone() -> None:
    async def endpoint(request: Request) -> PlainTextResponse:
        with BodyBytes().body("org") as in_flight:
            return PlainTextResponse(bytes(await read_bytes(request, in_flight)))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    metrics = Metrics()
    await app_of(endpoint, metrics)(dict(SCOPE), receive, send)

    assert requests_of(metrics, 499) == 1


async def test_each_request_has_an_id_of_its_own() -> None:
    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.state.request_id)

    metrics = Metrics()
    transport = httpx.ASGITransport(app_of(endpoint, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answers = [await http.get("/") for _ in range(3)]

    assert [answer.headers["request-id"] for answer in answers] == [a.text for a in answers]
    assert len({answer.text for answer in answers}) == 3
    assert requests_of(metrics, 200) == 3


async def test_a_probe_that_finds_all_well_is_not_an_info_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tmp_path) as gateway:
        with caplog.at_level(logging.DEBUG):
            await gateway.http.get("/healthz")
            await gateway.http.get("/nowhere")

    levels = {vars(r)["path"]: r.levelno for r in caplog.records if r.getMessage() == "request"}
    assert levels == {"/healthz": logging.DEBUG, "/nowhere": logging.INFO}
