"""What the engine reports of leases, written to the ledger database beside the requests.

The link tells reports at least once and the database keeps each once. A commit takes a while, so
what arrives meanwhile goes together into the next; of one lease only its newest report, whose
totals contain the older ones.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial

from billing.lease_reports import LeaseReport as BookedReport
from billing.lease_reports import book_lease_reports
from engine.client import LeaseReport
from gateway.dependencies import Dependencies
from gateway.errors import LedgerUnavailable
from gateway.requests.ledger_writes import write

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0  # after a write that failed
UNBOOKED_MAX = 10_000  # leases, while the database is away; the oldest are forgotten first


@asynccontextmanager
async def booking_leases(deps: Dependencies) -> AsyncIterator[None]:
    """Book lease reports as they come while the block runs, and at its end what is left."""
    inbox = _Inbox()
    tasks = [
        asyncio.create_task(_take_in(deps, inbox), name="lease reports in"),
        asyncio.create_task(_keep_booking(deps, inbox), name="lease reports out"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(LedgerUnavailable):
            await _book(deps, inbox.take())


class _Inbox:
    """The newest report of each lease that is not booked yet, oldest lease first."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._reports: dict[str, LeaseReport] = {}

    def put(self, report: LeaseReport) -> None:
        self._reports.pop(report.lease_id, None)
        self._reports[report.lease_id] = report
        self._forget_oldest()
        self.arrived.set()

    def put_back(self, reports: Sequence[LeaseReport]) -> None:
        """Again in front of what has come since; a newer report of the same lease stays."""
        self._reports = {report.lease_id: report for report in reports} | self._reports
        self._forget_oldest()
        self.arrived.set()

    def take(self) -> list[LeaseReport]:
        """All of them; the inbox is empty then."""
        reports, self._reports = list(self._reports.values()), {}
        self.arrived.clear()
        return reports

    def _forget_oldest(self) -> None:
        while len(self._reports) > UNBOOKED_MAX:
            self._reports.pop(next(iter(self._reports)))


async def _take_in(deps: Dependencies, inbox: _Inbox) -> None:
    async for report in deps.engine.lease_reports():
        inbox.put(report)


async def _keep_booking(deps: Dependencies, inbox: _Inbox) -> None:
    while True:
        await inbox.arrived.wait()
        reports = inbox.take()
        try:
            await _book(deps, reports)
        except LedgerUnavailable:  # the log has it
            inbox.put_back(reports)
            await asyncio.sleep(AGAIN_SECONDS)
        except asyncio.CancelledError:
            inbox.put_back(reports)  # booked or not: booking again changes nothing
            raise


async def _book(deps: Dependencies, reports: Sequence[LeaseReport]) -> None:
    if not reports:
        return
    booked = [BookedReport(**asdict(report)) for report in reports]
    await write(deps, partial(book_lease_reports, reports=booked, reported_at_ms=deps.now_ms()))
