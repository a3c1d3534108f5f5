"""Ownership: this gateway's heartbeat, and the end of gateways whose heart has stopped."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from billing.errors import OtherEngine, OwnerEnded, WriterUnavailable
from billing.owners import Owner, beat, end_owner, end_self, register, running_owners
from gateway.dependencies import Dependencies
from gateway.errors import LedgerUnavailable
from gateway.requests.ledger_writes import write
from gateway.requests.open_requests import OpenRequests

log = logging.getLogger(__name__)

BEATS_TO_DEATH = 6  # a writer that waits for a lock misses a few beats


class HeartMonitor:
    """Finds gateways whose heartbeat counter has stood still for too long by our own clock."""

    def __init__(self, dead_after_seconds: float) -> None:
        self._dead_after_seconds = dead_after_seconds
        self._seen: dict[str, tuple[int, float]] = {}  # boot id: beats, and since when so many

    def dead_among(self, owners: Sequence[Owner], *, now: float) -> list[Owner]:
        """Note the owners' counters at `now`, in seconds; return those that are dead."""
        seen = {}
        for owner in owners:
            beats, since = self._seen.get(owner.boot_id, (owner.beats, now))
            seen[owner.boot_id] = (owner.beats, since if beats == owner.beats else now)
        self._seen = seen
        return [o for o in owners if now - seen[o.boot_id][1] >= self._dead_after_seconds]

    def has_beaten(self, boot_id: str, *, beats: int) -> bool:
        """Whether this counter has moved since it was first noted."""
        return boot_id in self._seen and self._seen[boot_id][0] != beats


async def register_gateway(deps: Dependencies, *, instance_id: str, engine_id: str) -> None:
    """Register this gateway as an owner; the caller holds the lock of its instance.

    Raises OtherEngine if a gateway that lives uses another engine. To find out whether it lives
    takes until its next beat, or its death.
    """
    owner = Owner(
        boot_id=deps.boot_id,
        instance_id=instance_id,
        engine_id=engine_id,
        started_at_ms=deps.now_ms(),
        beats=0,
    )
    monitor = HeartMonitor(deps.settings.gateway_dead_after_seconds)
    while True:
        try:
            await write(deps, partial(register, owner=owner))
        except OtherEngine as error:
            if monitor.has_beaten(error.boot_id, beats=error.beats):
                raise
            await _end_the_dead(deps, monitor)
            await asyncio.sleep(_beat_seconds(deps))
        else:
            return


@asynccontextmanager
async def keeping_ownership(deps: Dependencies, open_requests: OpenRequests) -> AsyncIterator[None]:
    """Beat while the block runs, end the dead, and end this gateway's ownership at its end."""
    beating = asyncio.create_task(_keep_beating(deps, open_requests), name="ownership")
    try:
        yield
    finally:
        was_owner = not beating.done()
        beating.cancel()
        if was_owner:
            ending = partial(end_self, boot_id=deps.boot_id, ended_at_ms=deps.now_ms())
            with suppress(LedgerUnavailable):
                await write(deps, ending)


async def _keep_beating(deps: Dependencies, open_requests: OpenRequests) -> None:
    monitor = HeartMonitor(deps.settings.gateway_dead_after_seconds)
    while True:
        try:
            await write(deps, partial(beat, boot_id=deps.boot_id))
            if await _end_the_dead(deps, monitor):
                open_requests.hold_left_open.set()
        except OwnerEnded:
            log.exception("gateway_taken_for_dead")
            open_requests.fence()
            return
        except (LedgerUnavailable, SQLAlchemyError, WriterUnavailable):
            log.warning("heartbeat_failed", exc_info=True)
        await asyncio.sleep(_beat_seconds(deps))


async def _end_the_dead(deps: Dependencies, monitor: HeartMonitor) -> int:
    """End the other gateways that are dead; return how many."""
    owners = await deps.database.read(running_owners)
    others = [owner for owner in owners if owner.boot_id != deps.boot_id]
    num_ended = 0
    for dead in monitor.dead_among(others, now=asyncio.get_running_loop().time()):
        ending = partial(end_owner, owner=dead, ended_by=deps.boot_id, ended_at_ms=deps.now_ms())
        if await write(deps, ending):
            log.warning("gateway_found_dead", extra={"boot_id": dead.boot_id})
            num_ended += 1
    return num_ended


def _beat_seconds(deps: Dependencies) -> float:
    return deps.settings.gateway_dead_after_seconds / BEATS_TO_DEATH
