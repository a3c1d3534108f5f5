from pathlib import Path

import anthropic
import pytest

from tests.gateway.front import HEADERS, assert_error, front

IDS = ["a", "b", "c", "org/d"]


async def test_a_model_is_told_with_its_limits(tmp_path: Path) -> None:
    async with front(tmp_path) as gateway:
        answer = await gateway.http.get("/v1/models/wt", headers=HEADERS)

    model = anthropic.types.ModelInfo.model_validate(answer.json())
    assert model.id == "wt"
    assert model.created_at.isoformat() == "2026-03-01T12:00:00+00:00"
    assert model.max_input_tokens == 100_000


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", IDS, False),
        ("?limit=2", ["a", "b"], True),
        ("?limit=2&after_id=b", ["c", "org/d"], False),
        ("?limit=2&before_id=org/d", ["b", "c"], True),
        ("?before_id=a", [], False),
        ("?limit=4&beta=true", IDS, False),
    ],
)
async def test_models_are_listed_by_page(
    tmp_path: Path, query: str, ids: list[str], has_more: bool
) -> None:
    async with front(tmp_path, models=IDS) as gateway:
        answer = (await gateway.http.get(f"/v1/models{query}", headers=HEADERS)).json()

    assert [model["id"] for model in answer["data"]] == ids
    assert answer["has_more"] is has_more
    assert answer["first_id"] == (ids[0] if ids else None)
    assert answer["last_id"] == (ids[-1] if ids else None)


async def test_a_model_id_may_have_a_slash(tmp_path: Path) -> None:
    async with front(tmp_path, models=IDS) as gateway:
        answer = await gateway.http.get("/v1/models/org/d", headers=HEADERS)

    assert answer.json()["id"] == "org/d"


@pytest.mark.parametrize(
    ("path", "status", "error_type"),
    [
        ("/v1/models/nope", 404, "not_found_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
        ("/v1/models?limit=x", 400, "invalid_request_error"),
        ("/v1/models?after_id=nope", 400, "invalid_request_error"),
        ("/v1/models?after_id=a&before_id=b", 400, "invalid_request_error"),
    ],
)
async def test_faults_are_answered_in_the_one_shape(
    tmp_path: Path, path: str, status: int, error_type: str
) -> None:
    async with front(tmp_path, models=IDS) as gateway:
        answer = await gateway.http.get(path, headers=HEADERS)

    assert_error(answer, status, error_type)
