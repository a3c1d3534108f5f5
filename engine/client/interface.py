"""What a client of the engine may rely on, whichever way it is connected."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine.protocol import EngineInfo, EngineRecord, Event, GenerateRequest, LeaseReport


class RequestStream(Protocol):
    """One request in flight. Iterate it for its events; the last is Finished or Rejected.

    Raises EngineLost from iteration when the link ends first; the journal then knows the rest.
    """

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def abort(self) -> None:
        """Ask the engine to stop; the Finished event still comes. Idempotent."""

    def finish(self, output_tokens: int) -> None:
        """End the request at its `output_tokens`-th output token: the rest is overrun."""


class EngineClient(Protocol):
    """A multiplexed link to one engine that reconnects by itself."""

    async def ready(self, timeout_seconds: float) -> EngineInfo:
        """Wait for a live link and return what the engine is. Raises EngineLost after the bound."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What the connected engine is; None while there is no link."""
        ...

    def generate(self, request: GenerateRequest) -> RequestStream:
        """Submit a request. Raises EngineLost if there is no link now."""
        ...

    async def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord | None]:
        """The closed records of these requests, from the journal.

        None means still queued or running (ask again); an id the engine never admitted is absent.
        """
        ...

    async def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name, for /metrics."""
        ...

    async def unpin(
        self, *, lease_ids: Sequence[str] = (), namespaces: Sequence[bytes] = ()
    ) -> int:
        """End these leases and all of these namespaces, in every tier; how many there were.

        A tenant is the set of its namespaces. Idempotent: unknown ids and namespaces are none. When
        this returns, no tier outside the KV pool has anything of them, after a restart neither; in
        the pool their blocks are the next to be overwritten. Requests that run may still commit
        leases that they were granted: abort them first. Raises EngineLost.
        """
        ...

    def lease_reports(self) -> AsyncIterator[LeaseReport]:
        """What leases cost, as the engine reports it, across reconnects, for one iterator.

        Reports carry totals, so a missed or repeated one does no harm; ends with `close`.
        """
        ...

    async def close(self) -> None:
        """End the link and every stream on it."""
