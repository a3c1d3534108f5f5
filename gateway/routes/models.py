"""`GET /v1/models` and `GET /v1/models/{id}`: the served models."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query

from gateway.errors import InvalidRequest
from gateway.http.auth import AnyCaller, Deps, Version
from gateway.prompts.model_catalog import ServedModel
from gateway.wire.response import ModelInfo, ModelPage

router = APIRouter()

MAX_PAGE = 1000  # the API's own limit


@router.get("/v1/models")
async def list_models(
    _caller: AnyCaller,
    _version: Version,
    deps: Deps,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> ModelPage:
    """One page, forwards from the start or `after_id`, or backwards from `before_id`."""
    models = deps.catalog.models
    if after_id is not None and before_id is not None:
        raise InvalidRequest("only one of after_id and before_id may be given", path="before_id")
    if before_id is not None:
        left = models[: _position(models, before_id, name="before_id")]
        return _page(left[-limit:], has_more=len(left) > limit)
    start = 0 if after_id is None else _position(models, after_id, name="after_id") + 1
    left = models[start:]
    return _page(left[:limit], has_more=len(left) > limit)


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, _caller: AnyCaller, _version: Version, deps: Deps) -> ModelInfo:
    """One model."""
    return _model(deps.catalog.find(model_id))


def _position(models: Sequence[ServedModel], model_id: str, *, name: str) -> int:
    for position, model in enumerate(models):
        if model.id == model_id:
            return position
    raise InvalidRequest(f"no such model: {model_id}", path=name)


def _page(models: Sequence[ServedModel], *, has_more: bool) -> ModelPage:
    return ModelPage(
        data=tuple(_model(model) for model in models),
        has_more=has_more,
        first_id=models[0].id if models else None,
        last_id=models[-1].id if models else None,
    )


def _model(model: ServedModel) -> ModelInfo:
    created_at = datetime.fromtimestamp(model.created_at_ms // 1000, UTC)
    return ModelInfo(
        id=model.id,
        display_name=model.display_name,
        created_at=created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.context_window_tokens,
        max_tokens=model.context_window_tokens,
    )
