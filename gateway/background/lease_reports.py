"""Receives the engine's lease reports and records them in the ledger database as lease costs.

The link delivers a report at least once; the database keeps each once. Reports that arrive during a
commit go together into the next one: of one lease only the newest, since its totals contain the
older ones.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from billing.lease_costs import record_lease_costs
from engine.client import LeaseReport
from gateway.dependencies import Dependencies
from gateway.errors import LedgerUnavailable
from gateway.requests.ledger_writes import write
from gateway.requests.usage import lease_cost

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0  # after a write that failed
MAX_UNRECORDED = 10_000  # leases, while the database is away; the oldest are dropped first


@asynccontextmanager
async def recording_lease_costs(deps: Dependencies) -> AsyncIterator[None]:
    """Record lease reports as they arrive while the block runs, and at its end what is left."""
    inbox = _Inbox()
    tasks = [
        asyncio.create_task(_receive(deps, inbox), name="lease reports in"),
        asyncio.create_task(_keep_recording(deps, inbox), name="lease reports out"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(LedgerUnavailable):
            await _record(deps, inbox.take())


class _Inbox:
    """The newest report of each lease that is not recorded yet, oldest lease first."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._reports: dict[str, LeaseReport] = {}

    def put(self, report: LeaseReport) -> None:
        self._reports.pop(report.lease_id, None)
        self._reports[report.lease_id] = report
        self._drop_oldest()
        self.arrived.set()

    def put_back(self, reports: Sequence[LeaseReport]) -> None:
        """Put reports back in front of later ones; a newer report of the same lease stays."""
        self._reports = {report.lease_id: report for report in reports} | self._reports
        self._drop_oldest()
        self.arrived.set()

    def take(self) -> list[LeaseReport]:
        """Return all of them and empty the inbox."""
        reports, self._reports = list(self._reports.values()), {}
        self.arrived.clear()
        return reports

    def _drop_oldest(self) -> None:
        while len(self._reports) > MAX_UNRECORDED:
            self._reports.pop(next(iter(self._reports)))


async def _receive(deps: Dependencies, inbox: _Inbox) -> None:
    async for report in deps.engine.lease_reports():
        inbox.put(report)


async def _keep_recording(deps: Dependencies, inbox: _Inbox) -> None:
    while True:
        await inbox.arrived.wait()
        reports = inbox.take()
        try:
            await _record(deps, reports)
        except LedgerUnavailable:  # the log has it
            inbox.put_back(reports)
            await asyncio.sleep(AGAIN_SECONDS)
        except asyncio.CancelledError:
            inbox.put_back(reports)  # recorded or not: a second time changes nothing
            raise


async def _record(deps: Dependencies, reports: Sequence[LeaseReport]) -> None:
    if not reports:
        return
    costs = [lease_cost(report) for report in reports]
    await write(deps, partial(record_lease_costs, costs=costs, reported_at_ms=deps.now_ms()))
