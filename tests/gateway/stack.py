"""The real application on a real port, over the real engine core, on clocks that a test moves.

    client ── HTTP ──▶ uvicorn thread ── frames ──▶ engine thread (scripted runner)
                          └──▶ SQLite or PostgreSQL

Only the tokenizer is a toy (`words.py`) and only the runner follows a script.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from billing import customers, price_cards
from billing.database import Database, migrate
from billing.holds import open_holds
from billing.meters import Meter
from engine.client import Sampling, connect_engine
from engine.config import EngineConfig
from engine.plan import Plan
from gateway.app import create_app
from gateway.background.ownership import register_gateway
from gateway.clock import Clock as GatewayClock
from gateway.dependencies import Dependencies
from gateway.http.connection import HttpConnection
from gateway.ids import id_maker
from gateway.prompts.model_catalog import Catalog, ServedModel
from gateway.settings import Settings
from tests.engine.harness import Clock, RunningEngine, running_engine
from tests.engine.scripted_runner import ScriptedRunner
from tests.gateway.words import END_OF_TURN, VOCAB_SIZE, Words

MODEL = "words"
EPOCH_MS = 1_900_000_000_000
PATIENCE_SECONDS = 20.0

RATES = {  # pico-USD a token: 2 USD a million in, 10 out
    Meter.INPUT: 2_000_000,
    Meter.CACHE_READ: 200_000,
    Meter.CACHE_WRITE_5M: 2_500_000,
    Meter.CACHE_WRITE_1H: 4_000_000,
    Meter.OUTPUT: 10_000_000,
}


class Killed(BaseException):
    """What a killed engine's thread ends with."""


class MortalRunner(ScriptedRunner):
    """A scripted runner that can be killed in a step, and live again in the next engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampling: Sampling | None = None  # of the last row executed
        self._doomed = False
        self._dead = threading.Event()

    def execute(self, plan: Plan) -> list[int]:
        if self._doomed:
            self._dead.set()
            raise Killed
        self.sampling = plan.rows[-1].sampling
        return super().execute(plan)

    def kill(self) -> None:
        """End the engine at its next step, and wait for that."""
        self._doomed = True
        assert self._dead.wait(PATIENCE_SECONDS), "The engine had nothing to do."

    def revive(self) -> None:
        """Be as new; pauses too."""
        self._doomed = False
        self._dead.clear()
        self._pause.clear()


def word_config(**changes: Any) -> EngineConfig:
    """Room for all cases of docs/cases/messages-api.md at once."""
    limits: dict[str, Any] = {
        "num_blocks": 4_096,
        "max_model_len": 16_384,
        "vocab_size": VOCAB_SIZE,
        "pin_cap_blocks": 3_072,
        "namespace_quota_blocks": 3_072,
    }
    return EngineConfig(**(limits | changes))


@dataclass
class Stack:
    """A running gateway and what a test may touch of it."""

    folder: Path
    database: Database
    clock: Clock
    words: Words
    runner: MortalRunner
    config: EngineConfig
    settings: Settings
    url: str = ""
    engine: RunningEngine | None = None
    key: str = ""
    admin_key: str = ""
    _keys: int = 0
    wall_steps_ms: int = 0  # by which the wall clock was set back or forth
    _started_ms: int = 0
    _clients: dict[str, httpx.Client] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _engine_life: ExitStack = field(default_factory=ExitStack)
    _gateway: "Serving | None" = None

    def at(self, seconds: float) -> None:
        """Move both clocks to `seconds` after the start."""
        target_ms = self._started_ms + round(seconds * 1000)
        self.clock.advance(target_ms - self.clock.now_ms)

    def __post_init__(self) -> None:
        self._gateway_clock = GatewayClock(wall_ms=self._wall_ms, monotonic_ms=self.clock)

    def now_ms(self) -> int:
        """The gateway's time; the engine's is the same one, with another zero."""
        return self._gateway_clock()

    def _wall_ms(self) -> int:
        return EPOCH_MS + self.clock() + self.wall_steps_ms

    def start_engine(self, **changes: Any) -> None:
        """Start the engine, or start it again on the same journal; `changes` are what it is."""
        self.runner.revive()
        info = {"model_id": MODEL, "stop_token_ids": (END_OF_TURN,)} | changes
        self.engine = self._engine_life.enter_context(
            running_engine(self.runner, self.config, self.clock, self.folder, info=info)
        )

    def stop_engine(self) -> None:
        """End the engine as SIGTERM would: it aborts what runs and closes its records."""
        self._engine_life.close()

    def kill_engine(self) -> None:
        """End the engine in the middle of its next step; its journal stays as it is."""
        self.runner.kill()
        with pytest.raises(Killed):
            self._engine_life.close()

    def start_gateway(self, *, boot_id: str = "gw_one", instance: str = "folder") -> None:
        """Start a gateway process' worth, in a thread."""
        self._gateway = Serving(self, boot_id, instance)
        self._gateway.start()

    @property
    def gateway(self) -> "Serving":
        """The gateway that was started last."""
        assert self._gateway is not None
        return self._gateway

    def stop_gateway(self) -> None:
        """End it as SIGTERM would, without time for those who run."""
        assert self._gateway is not None
        self._gateway.stop()

    def kill_gateway(self) -> None:
        """End it where it stands: nothing is settled."""
        assert self._gateway is not None
        self._gateway.kill()

    def drain(self, seconds: float) -> None:
        """Let the gateway drain, as its command does before it stops."""
        assert self._gateway is not None
        self._gateway.drain(seconds)

    def new_key(
        self, *, organization: str = "org_one", workspace: str | None = None, kind: Any = "customer"
    ) -> str:
        """A fresh key's secret."""
        self._keys += 1
        secret = f"secret-{self._keys}"
        self.database.write_now(
            lambda conn: customers.create_key(
                conn,
                id=f"key_{self._keys}",
                secret=secret,
                organization_id=organization,
                workspace_id=workspace,
                name="test",
                kind=kind,
                now_ms=self.now_ms(),
            )
        )
        return secret

    def new_workspace(self, *, organization: str = "org_one", workspace: str) -> str:
        """A fresh workspace, and a key of it."""
        self.database.write_now(
            lambda conn: customers.create_workspace(
                conn,
                id=workspace,
                organization_id=organization,
                name="test",
                now_ms=self.now_ms(),
            )
        )
        return self.new_key(organization=organization, workspace=workspace)

    def new_organization(self, organization: str, *, mode: Any = "postpaid") -> str:
        """A fresh organisation, and a key of it."""
        self.database.write_now(
            lambda conn: customers.create_organization(
                conn, id=organization, name="test", mode=mode, now_ms=self.now_ms()
            )
        )
        return self.new_key(organization=organization)

    def http(self, key: str | None = None) -> httpx.Client:
        """The client with this key, the first organisation's unless named; threads share it."""
        key = key or self.key
        with self._lock:
            if key not in self._clients:
                headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
                self._clients[key] = httpx.Client(headers=headers, timeout=PATIENCE_SECONDS)
            client = self._clients[key]
            client.base_url = httpx.URL(self.url)
            return client

    def post(self, body: dict[str, Any], *, key: str | None = None) -> httpx.Response:
        """One request that is not streamed; five output words at most unless `body` says more."""
        return self.http(key).post("/v1/messages", json=complete(body))

    @contextmanager
    def in_background(self, body: dict[str, Any]) -> Iterator["Future[httpx.Response]"]:
        """The same in another thread; the block ends when it has been answered."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(self.post, body)

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[httpx.Response]:
        """A streamed request; leaving the block early is a client that goes away."""
        streamed = complete(body) | {"stream": True}
        with self.http().stream("POST", "/v1/messages", json=streamed) as response:
            yield response

    def leave_early(self, body: dict[str, Any], *, seconds: float) -> None:
        """A client that waits so long for its whole message, and then goes away."""
        with pytest.raises(httpx.ReadTimeout):
            self.http().post("/v1/messages", json=complete(body), timeout=seconds)

    def record(self, request_id: str, *, key: str | None = None) -> dict[str, Any]:
        """The request's record, over HTTP."""
        response = self.http(key).get(f"/v1/kvmeter/requests/{request_id}")
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def open_holds(self) -> list[str]:
        """The requests that the ledger still waits for."""
        return [hold.request_id for hold in self.database.read_now(open_holds)]

    def metric(self, name: str, **labels: str) -> float:
        """One of the gateway's own numbers, also while the engine does not answer a scrape."""
        assert self._gateway is not None
        return self._gateway.metric(name, labels)

    def close_clients(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()

    def wait_until(self, holds: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for something that other threads are about to do."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "It did not happen in time."
            time.sleep(0.005)


def complete(body: dict[str, Any]) -> dict[str, Any]:
    """The body with what every request needs."""
    return {"model": MODEL, "max_tokens": 5, **body}


@contextmanager
def running_stack(
    folder: Path,
    *,
    runner: MortalRunner | None = None,
    config: EngineConfig | None = None,
    database_url: str | None = None,
    database_class: type[Database] = Database,
    settings: dict[str, Any] | None = None,
) -> Iterator[Stack]:
    """The whole stack until the block ends; then it drains, and no hold may be open."""
    words = Words()
    url = database_url or f"sqlite:///{folder / 'ledger.sqlite3'}"
    migrate(url)
    clock = Clock()
    database = database_class(url, now_ms=lambda: EPOCH_MS + clock())
    stack = Stack(
        folder=folder,
        database=database,
        clock=clock,
        words=words,
        runner=runner or MortalRunner(words.ids("one two three four five")),
        config=config or word_config(),
        settings=Settings(data_dir=folder, **(settings or {})),
        _started_ms=clock.now_ms,
    )
    try:
        _found(stack)
        stack.start_engine()
        stack.start_gateway()
        try:
            yield stack
        finally:
            stack.runner.hurry()  # a test that failed may have left it waiting
            stack.close_clients()
            stack.stop_gateway()
    finally:
        stack.stop_engine()
        database.close()


class Serving:
    """The gateway's thread: its event loop, its engine link and its HTTP server."""

    def __init__(self, stack: Stack, boot_id: str, instance: str) -> None:
        self._stack = stack
        self._instance = instance
        self._boot_id = boot_id
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS), "The gateway did not start."
        self._require_no_failure()

    def stop(self) -> None:
        self._server.should_exit = True
        self._join()

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self._die(), self._loop).result(PATIENCE_SECONDS)
        self.stop()

    async def _die(self) -> None:
        """End every request's task and the engine link at once; nobody settles anything."""
        for task in asyncio.all_tasks():
            if task.get_name() in ("recovery", "ownership") or task.get_name().startswith("req_"):
                task.cancel()
        await self._engine.close()

    @property
    def deps(self) -> Dependencies:
        deps: Dependencies = self._app.state.deps
        return deps

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def num_cut(self) -> int:
        """How many open requests were cut, and have not ended yet."""
        generations = self._app.state.open_requests._tasks.values()
        return sum(generation._cut_by is not None for generation in list(generations))

    @property
    def fenced(self) -> bool:
        """Whether another gateway has taken this one for dead, and it knows."""
        return self._app.state.open_requests.fenced.is_set()

    def drain(self, seconds: float) -> None:
        draining = self._app.state.open_requests.drain(seconds)
        asyncio.run_coroutine_threadsafe(draining, self._loop).result(PATIENCE_SECONDS)

    def metric(self, name: str, labels: dict[str, str]) -> float:
        registry = self._app.state.deps.metrics.registry
        return registry.get_sample_value(name, labels) or 0.0

    def _join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "The gateway did not stop."
        self._require_no_failure()

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        stack = self._stack
        assert stack.engine is not None
        self._engine = engine = connect_engine(stack.engine.url)
        info = await engine.ready(PATIENCE_SECONDS)
        deps = Dependencies(
            settings=stack.settings,
            engine=engine,
            database=stack.database,
            catalog=Catalog([_word_model(stack, info.weights_digest)]),
            secret=b"server secret",
            boot_id=self._boot_id,
            now_ms=stack.now_ms,
            new_id=id_maker(stack.now_ms),
        )
        await register_gateway(deps, instance_id=self._instance, engine_id=info.engine_id)
        self._app = create_app(deps)
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            self._app,
            http=HttpConnection,
            port=0,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, on_started=self._take_url)
        try:
            await self._server.serve()
        finally:
            await engine.close()

    def _take_url(self, server: uvicorn.Server) -> None:
        port = server.servers[0].sockets[0].getsockname()[1]
        self._stack.url = f"http://127.0.0.1:{port}"
        self._started.set()


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[uvicorn.Server], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._on_started(self)


def _word_model(stack: Stack, weights_digest: str) -> ServedModel:
    return ServedModel(
        id=MODEL,
        display_name="Words",
        created_at_ms=EPOCH_MS,
        context_window_tokens=stack.config.max_model_len,
        min_cache_tokens=stack.settings.cache_min_tokens,
        weights_digest=weights_digest,
        chat_template=stack.words,
        tokenizer=stack.words,  # type: ignore[arg-type]
    )


def _found(stack: Stack) -> None:
    """The first organisation, its keys, and a price for the model."""
    card = price_cards.PriceCard(
        id=f"{MODEL}:1", model_id=MODEL, version=1, effective_from_ms=0, rates=RATES
    )
    stack.database.write_now(lambda conn: price_cards.publish(conn, [card], stack.now_ms()))
    stack.key = stack.new_organization("org_one")
    stack.admin_key = stack.new_key(kind="admin")
