from pathlib import Path

import pytest

from gateway.http.failed_keys import FAILURES_ALLOWED
from tests.gateway.bodies import body
from tests.gateway.front import ADMIN_KEY, HEADERS, KEY, OTHER_KEY, assert_error, front

COUNT = "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2026-10-21"}


def countable() -> dict[str, object]:
    return {name: value for name, value in body().items() if name != "max_tokens"}


@pytest.mark.parametrize(
    "credentials",
    [
        {"x-api-key": KEY},
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY, "authorization": "Bearer wrong"},
    ],
)
async def test_m28_either_header_is_a_credential_and_the_key_wins(
    tmp_path: Path, credentials: dict[str, str]
) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.post(COUNT, json=countable(), headers=VERSION | credentials)

    assert answer.status_code == 200
    assert answer.headers["anthropic-organization-id"] == "org_1"
    assert answer.headers["anthropic-workspace-id"] == "wrk_1"


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ({}, "x-api-key or authorization header is required"),
        ({"authorization": "Basic x"}, "x-api-key or authorization header is required"),
        ({"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}, "invalid x-api-key"),
        ({"authorization": "Bearer wrong"}, "invalid bearer token"),
    ],
)
async def test_m28_without_a_good_credential_nothing_else_is_looked_at(
    tmp_path: Path, credentials: dict[str, str], message: str
) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.post(COUNT, content=b"{", headers=credentials)

    assert assert_error(answer, 401, "authentication_error") == message
    assert "anthropic-organization-id" not in answer.headers


async def test_an_admin_key_spends_nothing_but_may_list_models(tmp_path: Path) -> None:
    admin = VERSION | {"x-api-key": ADMIN_KEY}
    async with front(tmp_path) as gateway:
        refused = await gateway.http.post(COUNT, json=countable(), headers=admin)
        listed = await gateway.http.get("/v1/models", headers=admin)

    assert_error(refused, 403, "permission_error")
    assert listed.status_code == 200
    assert "anthropic-workspace-id" not in listed.headers


async def test_a_named_workspace_must_be_the_keys_own(tmp_path: Path) -> None:
    other = HEADERS | {"x-api-key": OTHER_KEY}
    async with front(tmp_path) as gateway:
        own = await gateway.http.get(
            "/v1/models", headers=other | {"anthropic-workspace-id": "wrk_2"}
        )
        foreign = await gateway.http.get(
            "/v1/models", headers=other | {"anthropic-workspace-id": "wrk_1"}
        )

    assert own.status_code == 200
    assert_error(foreign, 403, "permission_error")


@pytest.mark.parametrize("path", [COUNT, "/v1/models", "/v1/models/wt"])
async def test_m29_the_version_header_is_required_and_known(tmp_path: Path, path: str) -> None:
    method = "POST" if path == COUNT else "GET"
    async with front(tmp_path) as gateway:
        missing = await gateway.http.request(method, path, headers={"x-api-key": KEY})
        unknown = await gateway.http.request(
            method, path, headers={"x-api-key": KEY, "anthropic-version": "2020-01-01"}
        )

    message = assert_error(missing, 400, "invalid_request_error")
    assert message == "anthropic-version: header is required"
    assert_error(unknown, 400, "invalid_request_error")


async def test_guessed_keys_are_soon_not_looked_up(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        for number in range(FAILURES_ALLOWED):
            guessed = VERSION | {"x-api-key": f"guess-{number}"}
            answer = await gateway.http.post(COUNT, json=countable(), headers=guessed)
            assert_error(answer, 401, "authentication_error")

        answer = await gateway.http.post(COUNT, json=countable(), headers=guessed)

    assert_error(answer, 429, "rate_limit_error")
    assert answer.headers["retry-after"] == "2"
