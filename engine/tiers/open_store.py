"""Opens an engine's lease store: measures the rates, creates the tiers, closes them at the end."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from engine.compute.model_runner import ModelRunner
from engine.config import EngineConfig
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from engine.tiers.lease_files import Origin
from engine.tiers.lease_store import LeaseStore
from engine.tiers.probing import (
    disk_bytes_per_second,
    fill_bytes_per_second,
    prefill_tokens_per_second,
)
from engine.tiers.tier import Costs, Tier

log = logging.getLogger(__name__)


@contextmanager
def open_lease_store(
    folder: Path,
    runner: ModelRunner,
    config: EngineConfig,
    origin: Origin,
    *,
    host_bytes: int,
    disk_bytes: int,
    clock_ns: Callable[[], int],
    wall_clock: Callable[[], int],
) -> Iterator[LeaseStore]:
    """Yield the lease store of an engine on `runner`; at exit, complete queued writes.

    0 bytes: without that tier. The measurement overwrites blocks, so call this before the pool is
    in use.
    """
    if not (host_bytes or disk_bytes):
        yield LeaseStore()
        return
    fill = fill_bytes_per_second(runner, runner.snapshot, config, clock_ns)
    speeds = {"host": fill}
    tiers: list[Tier] = []
    with ExitStack() as stack:
        if host_bytes:
            tiers.append(HostTier(budget_bytes=host_bytes))
        if disk_bytes:
            disk = DiskTier(
                folder,
                origin,
                budget_bytes=disk_bytes,
                clock=lambda: clock_ns() // 1_000_000,
                wall_clock=wall_clock,
            )
            tiers.append(stack.enter_context(closing(disk)))
            try:
                read = disk_bytes_per_second(folder, clock_ns)
                speeds["disk"] = 1 / (1 / read + 1 / fill)  # read, then fill: the times add up
            except OSError as error:  # no lease is copied to disk then
                log.warning("lease_folder_unusable: %s", error)
        yield LeaseStore(
            tiers,
            costs=Costs(prefill_tokens_per_second(runner, config, clock_ns), speeds),
            snapshot=runner.snapshot,
            block_size=config.block_size,
            block_bytes=config.block_bytes,
        )
