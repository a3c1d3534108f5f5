"""A gateway without its engine: real routes, real database, word tokens."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from billing.customers import create_key, create_organization, create_workspace
from billing.database import Database, migrate
from billing.owners import Owner, register
from engine.client import (
    EngineInfo,
    EngineLost,
    EngineRecord,
    GenerateRequest,
    LeaseReport,
    RequestStream,
    Sampling,
)
from gateway.app import create_app
from gateway.dependencies import Dependencies
from gateway.ids import id_maker
from gateway.prompts.model_catalog import Catalog, ServedModel
from gateway.settings import Settings
from tests.gateway.word_template import VOCAB_SIZE, WordTemplate, WordTokenizer

NOW_MS = 1_772_366_400_000  # 2026-03-01T12:00:00Z
WINDOW_TOKENS = 100_000

KEY = "kv-customer"
OTHER_KEY = "kv-other-workspace"
ADMIN_KEY = "kv-admin"

HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}


class IdleEngine:
    """An engine that is there and serves nothing; `lost` makes it unreachable."""

    def __init__(self) -> None:
        self.lost = False
        self.weights_digest = "digest"

    @property
    def info(self) -> EngineInfo | None:
        return EngineInfo(
            engine_id="engine_one",
            engine_boot_id="boot_engine",
            model_id="wt",
            weights_digest=self.weights_digest,
            vocab_size=VOCAB_SIZE,
            max_model_len=WINDOW_TOKENS,
            max_request_tokens=WINDOW_TOKENS,
            block_size=16,
            num_blocks=1,
            pin_cap_blocks=0,
            dtype="float32",
            device="cpu",
            stop_token_ids=(2,),
            default_sampling=Sampling(),
        )

    async def ready(self, timeout_seconds: float) -> EngineInfo:
        if self.info is None:
            raise EngineLost
        return self.info

    def generate(self, request: GenerateRequest) -> RequestStream:
        raise EngineLost

    async def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord | None]:
        return {}

    async def recent_requests(self, limit: int) -> list[str]:
        return []

    async def stats(self) -> dict[str, float]:
        if self.lost:
            raise EngineLost
        return {"num_requests_running": 2.0, "prefix_tokens_lease_read_total": 7.0}

    async def unpin(
        self, *, lease_ids: Sequence[str] = (), namespaces: Sequence[bytes] = ()
    ) -> int:
        return 0

    async def lease_reports(self) -> AsyncIterator[LeaseReport]:
        for report in ():
            yield report

    async def close(self) -> None:
        pass


def served(model_id: str = "wt") -> ServedModel:
    return ServedModel(
        id=model_id,
        display_name=model_id.upper(),
        created_at_ms=NOW_MS,
        context_window_tokens=WINDOW_TOKENS,
        min_cache_tokens=512,
        weights_digest="digest",
        chat_template=WordTemplate(),
        tokenizer=WordTokenizer(),
    )


def populate(database: Database) -> None:
    """One organisation with two workspaces, a key in each, and an admin key."""

    def write(conn):
        create_organization(conn, id="org_1", name="One", mode="postpaid", now_ms=NOW_MS)
        create_workspace(conn, id="wrk_2", organization_id="org_1", name="Two", now_ms=NOW_MS)
        for secret, workspace_id, kind in (
            (KEY, None, "customer"),
            (OTHER_KEY, "wrk_2", "customer"),
            (ADMIN_KEY, None, "admin"),
        ):
            create_key(
                conn,
                id=f"key_{secret}",
                secret=secret,
                organization_id="org_1",
                workspace_id=workspace_id,
                name=secret,
                kind=kind,
                now_ms=NOW_MS,
            )

    database.write_now(write)
    owner = Owner(
        boot_id="boot_gateway",
        instance_id="front",
        engine_id="engine_one",
        started_at_ms=NOW_MS,
        beats=0,
    )
    database.write_now(lambda conn: register(conn, owner))


class Front:
    """The gateway and what a test looks at."""

    def __init__(self, deps: Dependencies, engine: IdleEngine, http: httpx.AsyncClient) -> None:
        self.deps = deps
        self.engine = engine
        self.http = http


@asynccontextmanager
async def front(
    folder: Path, *, models: Sequence[str] = ("wt",), **settings_changes: int
) -> AsyncIterator[Front]:
    """A gateway on a fresh SQLite ledger in `folder`."""
    settings = Settings(data_dir=folder, **settings_changes)
    migrate(settings.ledger_url)
    database = Database(settings.ledger_url, now_ms=lambda: NOW_MS)
    populate(database)
    engine = IdleEngine()
    deps = Dependencies(
        settings=settings,
        engine=engine,
        database=database,
        catalog=Catalog([served(model_id) for model_id in models]),
        secret=b"secret",
        boot_id="boot_gateway",
        now_ms=lambda: NOW_MS,
        new_id=id_maker(lambda: NOW_MS),
    )
    transport = httpx.ASGITransport(create_app(deps))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        try:
            yield Front(deps, engine, http)
        finally:
            database.close()


def assert_error(response: httpx.Response, status: int, error_type: str) -> str:
    """Assert the one shape of errors; returns the message."""
    body = response.json()
    assert response.status_code == status, body
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) <= {"type", "message", "details"}
    assert body["error"]["type"] == error_type
    assert body["request_id"] == response.headers["request-id"]
    assert body["request_id"].startswith("req_")
    assert response.headers["content-type"] == "application/json"
    return body["error"]["message"]
