"""The protocol cases M28 to M35 of docs/cases/messages-api.md."""

from typing import Any

import httpx
import pytest

from tests.gateway.stack import MODEL, Stack
from tests.gateway.talk import assistant, hundreds, split_of_usage, text, user
from tests.sdk.versions import SdkError
from tests.system.conversation import AUTOMATIC, Conversation

BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [user(text("hello there"))]}
VERSION = {"anthropic-version": "2023-06-01"}


def assert_error(response: httpx.Response, status: int, kind: str, *words: str) -> None:
    """The one shape that every error body has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"]
    for word in words:
        assert word in body["error"]["message"]


def test_m28_both_sdks_and_either_header_are_known(stack: Stack, talk: Conversation) -> None:
    good, bad = talk.api_key, "kvm-no-such-key"

    assert talk.create(**BODY)["message"]["role"] == "assistant"

    def post(**headers: str) -> httpx.Response:
        return httpx.post(
            f"{stack.url}/v1/messages",
            json=BODY,
            headers=VERSION | {name.replace("_", "-"): value for name, value in headers.items()},
        )

    assert post(x_api_key=good, authorization=f"Bearer {bad}").status_code == 200
    assert_error(post(x_api_key=bad, authorization=f"Bearer {good}"), 401, "authentication_error")
    assert_error(post(), 401, "authentication_error")


def test_m29_every_error_has_the_apis_shape(stack: Stack, talk: Conversation) -> None:
    client = stack.http()
    no_version = client.build_request("POST", "/v1/messages", json=BODY)
    del no_version.headers["anthropic-version"]

    assert_error(
        client.send(no_version),
        400,
        "invalid_request_error",
        "anthropic-version: header is required",
    )
    assert_error(
        client.post("/v1/messages", json={**BODY, "surprise": 1}),
        400,
        "invalid_request_error",
        "surprise: Extra inputs are not permitted",
    )
    assert_error(client.post("/v1/messages", content=b'{"model": '), 400, "invalid_request_error")
    assert_error(
        client.post("/v1/messages", json={**BODY, "max_tokens": "many"}),
        400,
        "invalid_request_error",
        "max_tokens",
    )
    assert_error(client.get("/v1/messages"), 405, "invalid_request_error")
    assert_error(client.get("/v1/nothing"), 404, "not_found_error")


@pytest.mark.parametrize(("api_version", "status"), [("2023-06-01", 200), ("2026-10-21", 400)])
def test_m30_sampling_fields_belong_to_the_old_version(
    stack: Stack, talk: Conversation, api_version: str, status: int
) -> None:
    headers = {"anthropic-version": api_version}

    client = stack.http()
    response = client.post("/v1/messages", json={**BODY, "temperature": 1.0}, headers=headers)

    assert response.status_code == status
    if status == 400:
        assert_error(
            response,
            400,
            "invalid_request_error",
            "temperature: Extra inputs are not permitted",
        )


def test_m32_an_unknown_model_is_not_found(talk: Conversation) -> None:
    with pytest.raises(SdkError) as missing:
        talk.create(**{**BODY, "model": "x"})

    assert missing.value.status == 404
    assert missing.value.type == "not_found_error"
    assert "model: x" in missing.value.message
    assert missing.value.class_name == "NotFoundError"


def test_m33_a_body_over_32_mb_is_too_large(stack: Stack, talk: Conversation) -> None:
    client = stack.http()
    response = client.post("/v1/messages", content=b" " * 33_000_000 + b"{}")

    assert_error(response, 413, "request_too_large")


BODIES: dict[str, dict[str, Any]] = {
    "m01": {"system": [text(2000, "s", ttl="5m")], "messages": [user(text(20, "u"))]},
    "m04 short": {"system": [text(511, "s", ttl="5m")], "messages": [user(text(5, "u"))]},
    "m05": {"messages": [hundreds(15, marked=[15])]},
    "m06": {"messages": [hundreds(35, marked=[15, 35])]},
    "m10": {
        "cache_control": AUTOMATIC,
        "system": [text(1500, "s")],
        "messages": [user(text(50, "u")), assistant(text(120, "a")), user(text(60, "v"))],
    },
    "m13": {"messages": [user(text(3000, "u"))]},
    "m17": {
        "system": [text(800, "s", ttl="1h")],
        "messages": [user(text("warmup"))],
        "max_tokens": 0,
    },
    "m20": {"messages": [user(text(1500, "stable"), text(10, "time", ttl="5m"))]},
}


@pytest.mark.parametrize("name", BODIES)
def test_m34_counting_tells_what_the_request_will_be_billed(talk: Conversation, name: str) -> None:
    body = BODIES[name]

    counted = talk.count(**body)
    cold, warm = talk.create(**body), talk.create(**body)

    assert split_of_usage(cold["message"]["usage"]).prompt == counted
    assert split_of_usage(warm["message"]["usage"]).prompt == counted


def test_m35_null_is_as_good_as_absent(stack: Stack, talk: Conversation) -> None:
    optional = (
        "cache_control",
        "container",
        "diagnostics",
        "inference_geo",
        "metadata",
        "output_config",
        "service_tier",
        "speed",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    )

    client = stack.http()
    response = client.post("/v1/messages", json=BODY | dict.fromkeys(optional))

    assert response.status_code == 200, response.text
