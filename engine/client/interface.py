"""The client's interface as typing protocols: EngineClient and RequestStream."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine.protocol import EngineInfo, EngineRecord, Event, GenerateRequest, LeaseReport


class RequestStream(Protocol):
    """An async iterator over one request's events; the last is Finished or Rejected.

    Iteration raises EngineLost if the link ends first; `EngineClient.lookup` has the record later.
    """

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def abort(self) -> None:
        """Ask the engine to stop; the Finished event still comes. Idempotent."""

    def finish(self, output_tokens: int) -> None:
        """End the request at its `output_tokens`-th output token; later tokens are overrun."""


class EngineClient(Protocol):
    """A client of one engine; all requests share one link, which reconnects by itself."""

    async def ready(self, timeout_seconds: float) -> EngineInfo:
        """Wait for a live link and return the engine's info. Raises EngineLost on timeout."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """The connected engine's info; None while there is no link."""
        ...

    def generate(self, request: GenerateRequest) -> RequestStream:
        """Submit a request and return its stream. Raises EngineLost if there is no link now."""
        ...

    async def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord | None]:
        """Return the closed records of these requests, from the engine's journal.

        None: still queued or running, call again. Absent: the engine never admitted the id.
        """
        ...

    async def recent_requests(self, limit: int) -> list[str]:
        """Return the last requests that have a closed record, at most 1,000, newest first."""
        ...

    async def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name, for /metrics."""
        ...

    async def unpin(
        self, *, lease_ids: Sequence[str] = (), namespaces: Sequence[bytes] = ()
    ) -> int:
        """End these leases and all leases of these namespaces, and return how many there were.

        When this returns, no tier outside the KV pool holds their data, also not after a restart;
        in the pool their blocks are the first to be evicted. Running requests may still commit
        leases that they were granted: abort them first. Unknown ids and namespaces are ignored.
        Raises EngineLost.
        """
        ...

    def lease_reports(self) -> AsyncIterator[LeaseReport]:
        """Iterate over the engine's lease reports, across reconnects, until `close`.

        Reports carry totals, so a missed or repeated one does no harm. One iterator at a time.
        """
        ...

    async def close(self) -> None:
        """End the link and every stream on it."""
