"""A whole engine in a thread: the real core, journal, server and link around any runner."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.journal.journal import Journal
from engine.link.address import bound_url, listen
from engine.link.server import EngineServer
from engine.plan import Runner
from engine.protocol import EngineInfo, GenerateRequest, Sampling
from tests.engine.scripted_runner import ScriptedRunner


class Clock:
    """Milliseconds that pass only when a test says so."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms
        self.on_advance: list[Callable[[], None]] = []

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        """Jump ahead, and let every engine on this clock notice."""
        self.now_ms += ms
        for notice in self.on_advance:
            notice()


@dataclass(frozen=True)
class RunningEngine:
    """What a test holds of an engine. The core and the journal belong to the engine's thread."""

    url: str
    info: EngineInfo
    core: EngineCore
    journal: Journal
    server: EngineServer


@contextmanager
def running_engine(
    runner: Runner,
    config: EngineConfig,
    clock: Callable[[], int],
    tmp_path: Path,
    *,
    url: str | None = None,
    info: dict[str, Any] | None = None,
) -> Iterator[RunningEngine]:
    """Serve until the block ends; then abort what runs, as at a SIGTERM.

    Two runs on one `tmp_path` are one engine restarted: same journal, same default URL. `info`
    overrides fields of what the engine says it is.
    """
    with closing(Journal(tmp_path / "journal")) as journal:
        facts = engine_info(config, **(info or {}))
        core = EngineCore(config, runner, boot_id=facts.engine_boot_id, journal=journal)
        url = url or f"unix:{tmp_path / 'engine.sock'}"
        listener = listen(url)
        server = EngineServer(core, facts, listener, journal, clock)
        if isinstance(clock, Clock):
            clock.on_advance.append(server.wake)
        with _in_thread(server, runner):
            yield RunningEngine(bound_url(listener, url), facts, core, journal, server)


def small_config(**changes: Any) -> EngineConfig:
    """A pool of 64 blocks for a model with a context of 512 tokens."""
    limits: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 512,
        "vocab_size": 1_000,
        "pin_cap_blocks": 32,
        "namespace_quota_blocks": 32,
    }
    return EngineConfig(**(limits | changes))


def engine_info(config: EngineConfig, **changes: Any) -> EngineInfo:
    """What an engine with this config says it is; every call is another boot."""
    facts: dict[str, Any] = {
        "engine_id": "engine_test",
        "engine_boot_id": f"eng_{uuid4().hex}",
        "model_id": "tiny",
        "weights_digest": "0" * 64,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "max_request_tokens": config.max_request_tokens,
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "pin_cap_blocks": config.pin_cap_blocks,
        "dtype": "float32",
        "device": "cpu",
        "stop_token_ids": (2,),
        "default_sampling": Sampling(temperature=0.0),
    }
    return EngineInfo(**(facts | changes))


def generate_request(
    request_id: str, prompt_tokens: int = 20, max_tokens: int = 3, **fields: Any
) -> GenerateRequest:
    """A greedy request whose prompt is 100, 101, 102 and so on."""
    prompt = np.arange(100, 100 + prompt_tokens).astype("<u4").tobytes()
    values: dict[str, Any] = {
        "request_id": request_id,
        "namespace": b"tenant",
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "sampling": Sampling(temperature=0.0),
    }
    return GenerateRequest(**(values | fields))


@contextmanager
def _in_thread(server: EngineServer, runner: Runner) -> Iterator[None]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as threads:
        run = threads.submit(server.run)
        try:
            yield
        finally:
            if isinstance(runner, ScriptedRunner):
                runner.hurry()
            server.stop()
    run.result()
