from pathlib import Path
from typing import Any

from gateway.http.bodies import MAX_BODY_BYTES
from tests.gateway.bodies import EPHEMERAL, text, turn
from tests.gateway.front import HEADERS, WINDOW_TOKENS, Front, assert_error, front

COUNT = "/v1/messages/count_tokens"


async def count(gateway: Front, **fields: Any):
    sound = {"model": "wt", "messages": [turn("user", text("one two three"))]}
    return await gateway.http.post(COUNT, json=sound | fields, headers=HEADERS)


async def test_the_count_is_the_whole_prompt_markers_or_not(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        plain = await count(gateway, system="a b")
        marked = await count(
            gateway, system=[text("a b", cache_control=EPHEMERAL)], cache_control=EPHEMERAL
        )

    assert plain.json() == marked.json() == {"input_tokens": 5}


async def test_what_shapes_no_prompt_is_no_field_of_it(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        answer = await count(gateway, max_tokens=5)

    message = assert_error(answer, 400, "invalid_request_error")
    assert message == "max_tokens: Extra inputs are not permitted"


async def test_m32_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        answer = await count(gateway, model="claude-x")

    assert assert_error(answer, 404, "not_found_error") == "model: claude-x"


async def test_a_prompt_over_the_window_is_too_long(tmp_path: Path) -> None:
    words = "x " * (WINDOW_TOKENS + 1)
    async with front(tmp_path) as gateway:
        answer = await count(gateway, messages=[turn("user", text(words))])

    message = assert_error(answer, 400, "invalid_request_error")
    assert message == f"prompt is too long: {WINDOW_TOKENS + 1} tokens > {WINDOW_TOKENS} maximum"


async def test_m33_a_body_over_the_limit_is_too_large(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.post(
            COUNT, content=b" " * (MAX_BODY_BYTES + 1), headers=HEADERS
        )

    assert_error(answer, 413, "request_too_large")


async def test_a_compressed_body_is_refused_with_its_code(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.post(
            COUNT, content=b"", headers=HEADERS | {"content-encoding": "gzip"}
        )

    assert_error(answer, 400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "request_body_encoding_unsupported"}
