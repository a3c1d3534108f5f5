import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import billing.errors
from billing.errors import BillingError, InsufficientBalance
from engine.client import EngineLost, Rejected
from gateway.errors import (
    ERROR_SHAPES,
    INTERNAL,
    GatewayError,
    ModelFolderError,
    Overloaded,
    error_body,
    rejection,
    shape_of,
)
from tests.gateway.front import assert_error, front


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


@pytest.mark.parametrize(
    "kind", [*subclasses(GatewayError), *subclasses(BillingError), BillingError, EngineLost]
)
def test_every_error_has_a_row(kind: type[Exception]) -> None:
    if kind is not ModelFolderError:  # never met by a request
        assert any(ancestor in ERROR_SHAPES for ancestor in kind.__mro__)


def test_billings_internal_errors_tell_a_client_nothing() -> None:
    error = billing.errors.HoldNotFound("req_secret")

    body = error_body(error, request_id="req_1")

    assert shape_of(error) == INTERNAL
    assert "req_secret" not in body.model_dump_json()


def test_a_low_balance_is_a_billing_error() -> None:
    error = InsufficientBalance("org_1", needed_nanos=5)

    assert (shape_of(error).status, shape_of(error).type) == (402, "billing_error")
    assert "org_1" not in error_body(error, request_id="req_1").error.message


@pytest.mark.parametrize(
    ("code", "status"),
    [("overloaded", 529), ("prompt_too_long", 400), ("pool_too_small", 400)],
)
def test_the_engines_refusals_have_their_status(code, status: int) -> None:
    assert shape_of(rejection(Rejected("req_1", code, "why"))).status == status


@pytest.mark.parametrize(
    ("method", "path", "status", "error_type"),
    [
        ("GET", "/nowhere", 404, "not_found_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/models", 405, "invalid_request_error"),
        ("GET", "/v1/models/", 401, "authentication_error"),
        ("GET", "/openapi.json", 404, "not_found_error"),
    ],
)
async def test_m29_the_frameworks_own_bodies_never_leave(
    tmp_path: Path, method: str, path: str, status: int, error_type: str
) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.request(method, path)

    assert_error(answer, status, error_type)


async def test_an_unforeseen_error_is_a_500_that_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tmp_path) as gateway:

        async def stats() -> dict[str, float]:
            raise RuntimeError("a detail")

        gateway.engine.stats = stats
        with caplog.at_level(logging.ERROR):
            answer = await gateway.http.get("/metrics")

    assert assert_error(answer, 500, "api_error") == "Internal server error"
    assert [record.getMessage() for record in caplog.records] == ["request_failed"]


async def test_an_error_brings_its_own_headers(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:

        async def stats() -> dict[str, float]:
            raise Overloaded("Come back later", headers={"retry-after": "7"})

        gateway.engine.stats = stats
        answer = await gateway.http.get("/metrics")

    assert_error(answer, 529, "overloaded_error")
    assert answer.headers["retry-after"] == "7"
