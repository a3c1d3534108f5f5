"""`GET /healthz`, `/readyz` and `/metrics`, without a key."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from typing_extensions import override

from billing.errors import BillingError, UnknownPrice
from billing.holds import OpenHoldCount, count_open_holds
from billing.price_cards import card_in_force
from billing.schema import require_head
from engine.client import EngineInfo, EngineLost
from gateway.dependencies import Dependencies
from gateway.errors import NotReady
from gateway.http.auth import Deps

router = APIRouter()

ENGINE_ANSWER_SECONDS = 2  # a scrape and a probe must end, even while the engine restarts


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """This process runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(deps: Deps) -> dict[str, str]:
    """Requests would be served. Raises NotReady that names what is missing."""
    missing = [reason async for reason in _missing(deps)]
    if missing:
        raise NotReady("; ".join(missing))
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(deps: Deps) -> Response:
    """The gateway's counters, the ledger's open holds, the engine's numbers; Prometheus' text."""
    registry = CollectorRegistry()
    registry.register(_EngineNumbers(await _engine_stats(deps) or {}))
    if (holds := await _open_holds(deps)) is not None:
        registry.register(_OpenHoldNumbers(holds, now_ms=deps.now_ms()))
    text = generate_latest(deps.metrics.registry) + generate_latest(registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _missing(deps: Dependencies) -> AsyncIterator[str]:
    try:
        await deps.database.read(require_head)
        unpriced = await deps.database.read(partial(_unpriced_models, deps=deps))
    except (BillingError, SQLAlchemyError):
        yield "database: not migrated, or not reachable"
    else:
        for model_id in unpriced:
            yield f"price: no price card is in force for the model: {model_id}"
    if await _engine_stats(deps) is None:
        yield "engine: does not answer"
    elif (info := deps.engine.info) is not None and not _is_served(deps, info):
        yield f"engine: runs other weights than this gateway serves: {info.model_id}"


def _unpriced_models(conn: Connection, *, deps: Dependencies) -> list[str]:
    """Return the served models that cannot be sold now."""
    unpriced = []
    for model in deps.catalog.models:
        try:
            card_in_force(conn, model.id, deps.now_ms())
        except UnknownPrice:
            unpriced.append(model.id)
    return unpriced


def _is_served(deps: Dependencies, info: EngineInfo) -> bool:
    return any(model.is_run_by(info) for model in deps.catalog.models)


async def _engine_stats(deps: Dependencies) -> dict[str, float] | None:
    """Return the engine's stats by metric name; None if they do not arrive in time."""
    try:
        async with asyncio.timeout(ENGINE_ANSWER_SECONDS):
            return await deps.engine.stats()
    except (EngineLost, TimeoutError):
        return None


async def _open_holds(deps: Dependencies) -> OpenHoldCount | None:
    """Return the open holds of the whole database; None while it cannot be read."""
    try:
        return await deps.database.read(count_open_holds)
    except (BillingError, SQLAlchemyError):
        return None


class _OpenHoldNumbers(Collector):
    """How many holds are open in the ledger, and how long the oldest has been; 0 if none is."""

    def __init__(self, holds: OpenHoldCount, *, now_ms: int) -> None:
        self._num_holds = holds.num_holds
        oldest_ms = holds.oldest_started_at_ms
        self._oldest_seconds = 0.0 if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000

    @override
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvmeter_open_holds", "Holds that are open in the ledger.", value=self._num_holds
        )
        yield GaugeMetricFamily(
            "kvmeter_oldest_open_hold_seconds",
            "How long the oldest open hold has been open.",
            value=self._oldest_seconds,
        )


class _EngineNumbers(Collector):
    """The engine's numbers of one moment, under the engine's own names."""

    def __init__(self, stats: Mapping[str, float]) -> None:
        self._stats = stats

    @override
    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name, f"The engine's {name}.", value=value)
