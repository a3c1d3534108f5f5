"""The engine's memory of what it did: facts are written here before any frame tells them.

Three kinds of segment lie in one folder. `open-N.log` has the facts of requests in flight:
admitted, committed, produced. `closed-N.log` has one final record a request, and is what lookups
read. `lease-N.log` has the reports of leases, for people and for what the link missed. A kill
loses nothing that was written; a power cut loses at most the last SYNC_SECONDS. At the next start
every request that is open and not closed gets its record: engine_lost, with the last facts written.

Closed records and reports are each kept until they fill KEPT_BYTES, about 200,000 requests; the
oldest go first.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import FrameError, JournalError
from engine.journal.segments import (
    Segment,
    read_line,
    read_segment,
    segment_numbers,
    segment_path,
    sync_folder,
)
from engine.journal.syncing import Syncer
from engine.protocol import EngineRecord, LeaseReport
from engine.wire import from_plain, to_plain

SEGMENT_BYTES = 8 << 20
KEPT_BYTES = 128 << 20
_OFFSET_BITS = 40  # a line's place is one integer, segment number above offset: the index is large


class Journal:
    """Facts in, closed records out; one engine at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Lock the folder and close what an earlier engine left open. Raises JournalError."""
        self._folder = folder
        self._segment_bytes, self._kept_bytes = segment_bytes, kept_bytes
        self._open: Segment
        self._closed: Segment
        self._leases: Segment
        self._places: dict[str, int] = {}  # closed requests, oldest first
        self._in_flight: dict[str, _InFlight] = {}
        self._produced: dict[str, int] = {}  # since the last flush
        self._lock = _locked(folder)
        try:
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise
        self._syncer = Syncer(self._sync)

    def admitted(self, record: EngineRecord) -> None:
        """A request was admitted: its facts and grants are final from here."""
        self._in_flight[record.request_id] = _InFlight(record, record.output_tokens)
        self._open.append({"admitted": to_plain(EngineRecord, record)})

    def committed(self, request_id: str, num_tokens: int) -> None:
        """The breakpoint at `num_tokens` is computed and pinned."""
        self._in_flight[request_id].committed.add(num_tokens)
        self._open.append({"committed": request_id, "tokens": num_tokens})

    def produced(self, request_id: str, output_tokens: int) -> None:
        """The request has `output_tokens` output tokens in all."""
        self._in_flight[request_id].output_tokens = output_tokens
        self._produced[request_id] = output_tokens

    def finished(self, record: EngineRecord) -> None:
        """The request ended; this record is the truth about it."""
        self._in_flight.pop(record.request_id, None)
        offset = self._closed.append(to_plain(EngineRecord, record))
        self._places[record.request_id] = self._closed.number << _OFFSET_BITS | offset

    def reported(self, report: LeaseReport) -> None:
        """What a lease has cost so far."""
        self._leases.append(to_plain(LeaseReport, report))

    def flush(self) -> None:
        """Write what was noted since the last call; only then may frames tell it.

        Raises JournalError: an engine that cannot write its journal must stop.
        """
        if self._produced:
            self._open.append({"produced": self._produced})
            self._produced = {}
        # Closed first: an end outweighs all that was noted on the way to it.
        if any([self._closed.write(), self._open.write(), self._leases.write()]):
            self._syncer.wrote()
        if self._closed.size >= self._segment_bytes:
            self._closed = self._rotated(self._closed)
        if self._leases.size >= self._segment_bytes:
            self._leases = self._rotated(self._leases)
        if self._open.size >= self._segment_bytes:
            self._rotate_open()

    def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord]:
        """The closed records among these requests. Raises JournalError."""
        self.flush()
        return {
            request_id: self._record_at(self._places[request_id])
            for request_id in request_ids
            if request_id in self._places
        }

    def last_reports(self, limit: int) -> list[LeaseReport]:
        """The newest report of each of the `limit` leases reported last, the newest last.

        Reads files from the newest on, until there are enough. Raises JournalError.
        """
        newest: dict[str, LeaseReport] = {}
        for number in reversed(segment_numbers(self._folder, "lease")):
            lines = [data for _, data in read_segment(segment_path(self._folder, "lease", number))]
            for data in reversed(lines):
                with suppress(FrameError):  # of another version: its lease ended long ago
                    report: LeaseReport = from_plain(LeaseReport, data)
                    newest.setdefault(report.lease_id, report)
                if len(newest) == limit:
                    return list(newest.values())[::-1]
        return list(newest.values())[::-1]

    def __contains__(self, request_id: str) -> bool:
        """Whether this request was ever admitted, as far back as the journal goes."""
        return request_id in self._places or request_id in self._in_flight

    def close(self) -> None:
        """Write and sync everything and let another engine have the folder. Raises JournalError."""
        with ExitStack() as stack:
            stack.callback(os.close, self._lock)
            stack.callback(self._open.close)
            stack.callback(self._closed.close)
            stack.callback(self._leases.close)
            stack.callback(self._syncer.close)
            self.flush()

    def _recover(self) -> None:
        """Index the closed records, give every request left open one, then start afresh."""
        for number in segment_numbers(self._folder, "closed"):
            for offset, data in read_segment(segment_path(self._folder, "closed", number)):
                self._places[data["request_id"]] = number << _OFFSET_BITS | offset
        stale = segment_numbers(self._folder, "open")
        lost = self._left_open(stale)
        self._closed = self._next_segment("closed")
        self._open = self._next_segment("open")
        self._leases = self._next_segment("lease")
        for request in lost:
            self.finished(replace(request.record_now(), finish_reason="engine_lost"))
        self._closed.write()
        self._closed.sync()
        for number in stale:
            self._drop("open", number)
        self._drop_oldest("closed")
        self._drop_oldest("lease")

    def _left_open(self, numbers: list[int]) -> list["_InFlight"]:
        """What the open segments say of requests that no closed segment has."""
        requests: dict[str, _InFlight] = {}
        for number in numbers:
            path = segment_path(self._folder, "open", number)
            for _, line in read_segment(path):
                if "admitted" in line:
                    record = _record(line["admitted"], path)
                    requests[record.request_id] = _InFlight(record, record.output_tokens)
                elif "produced" in line:
                    for request_id, output_tokens in line["produced"].items():
                        if request_id in requests:
                            requests[request_id].output_tokens = output_tokens
                elif line["committed"] in requests:
                    requests[line["committed"]].committed.add(line["tokens"])
        return [request for id_, request in requests.items() if id_ not in self._places]

    def _rotated(self, full: Segment) -> Segment:
        """The segment after `full`, of its kind; the oldest ones make room."""
        with self._syncer.busy:
            full.sync()
            full.close()
            following = self._next_segment(full.kind)
        self._drop_oldest(full.kind)
        return following

    def _rotate_open(self) -> None:
        """Carry what is in flight into a new segment; the old one has nothing more to say."""
        with self._syncer.busy:
            old, self._open = self._open, self._next_segment("open")
            for request in self._in_flight.values():
                self._open.append({"admitted": to_plain(EngineRecord, request.record_now())})
            self._open.write()
            self._sync()
            old.close()
        self._drop("open", old.number)

    def _drop_oldest(self, kind: str) -> None:
        """Remove the oldest segments of a kind until the rest fits, and forget their records."""
        *older, _ = segment_numbers(self._folder, kind)
        sizes = {
            number: segment_path(self._folder, kind, number).stat().st_size for number in older
        }
        kept_bytes = sum(sizes.values())
        for number, size in sizes.items():
            if size and kept_bytes <= self._kept_bytes:
                continue
            kept_bytes -= size
            self._drop(kind, number)
            while kind == "closed" and self._places:
                oldest = next(iter(self._places))
                if self._places[oldest] >> _OFFSET_BITS != number:
                    break
                del self._places[oldest]

    def _drop(self, kind: str, number: int) -> None:
        segment_path(self._folder, kind, number).unlink(missing_ok=True)

    def _next_segment(self, kind: str) -> Segment:
        numbers = segment_numbers(self._folder, kind)
        segment = Segment(self._folder, kind, numbers[-1] + 1 if numbers else 1)
        sync_folder(self._folder)
        return segment

    def _sync(self) -> None:
        self._open.sync()
        self._closed.sync()
        self._leases.sync()

    def _record_at(self, place: int) -> EngineRecord:
        path = segment_path(self._folder, "closed", place >> _OFFSET_BITS)
        return _record(read_line(path, place & ((1 << _OFFSET_BITS) - 1)), path)


@dataclass(slots=True)
class _InFlight:
    """An admitted request that has not ended: its record at admission, and what came since."""

    record: EngineRecord
    output_tokens: int
    committed: set[int] = field(default_factory=set)

    def record_now(self) -> EngineRecord:
        """The record with the facts up to now."""
        grants = tuple(
            replace(grant, committed=grant.committed or grant.num_tokens in self.committed)
            for grant in self.record.grants
        )
        return replace(self.record, grants=grants, output_tokens=self.output_tokens)


def _record(data: object, path: Path) -> EngineRecord:
    try:
        record: EngineRecord = from_plain(EngineRecord, data)
    except FrameError as error:
        raise JournalError(f"The journal {path} is of another version: {error}") from error
    return record


def _locked(folder: Path) -> int:
    """Hold the folder's lock until the descriptor is closed, by us or by our death."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise JournalError(f"Cannot write the journal {folder}: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise JournalError(f"Another engine is using the journal: {folder}") from None
    return lock
