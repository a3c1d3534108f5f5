"""The engine's write-ahead log: appends facts of requests and leases, recovers, finds records.

One folder holds three kinds of log files, in segments:

    open-N.log     facts of running requests: admitted, committed, produced
    closed-N.log   one final record a request; read by lookups
    lease-N.log    lease reports, for inspection and for links that missed them

A killed process loses nothing that was written; a power cut loses at most the last SYNC_SECONDS. At
the next start every request that is open and not closed is closed as `engine_lost`, with the last
facts written. Closed records and reports are each kept up to KEPT_BYTES; the oldest are removed.
"""

import fcntl
import logging
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
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

log = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20
KEPT_BYTES = 128 << 20
ENGINE_ID = re.compile(rb"engine_[0-9a-f]{32}")
ENGINE_ID_BYTES = 39
_OFFSET_BITS = 40  # a line's place is segment number << 40 | offset: one int, as the index is large


class Journal:
    """The journal in one folder, which one engine process locks; see JournalSink for the facts."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Lock the folder, close requests that an earlier engine left open. Raises JournalError."""
        self._folder = folder
        self._segment_bytes, self._kept_bytes = segment_bytes, kept_bytes
        self._open: Segment
        self._closed: Segment
        self._leases: Segment
        self._places: dict[str, int] = {}  # closed requests, oldest first
        self._open_requests: dict[str, _OpenRequest] = {}
        self._num_unreadable = 0
        self._produced: dict[str, int] = {}  # output tokens by request, since the last flush
        self._lock = _locked(folder)
        try:
            self.engine_id = _engine_id(self._lock)
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise
        self._syncer = Syncer(self._sync)

    def admitted(self, record: EngineRecord) -> None:
        """Append a request's record at admission; its facts and grants are final."""
        self._open_requests[record.request_id] = _OpenRequest(record, record.output_tokens)
        self._open.append({"admitted": to_plain(EngineRecord, record)})

    def committed(self, request_id: str, num_tokens: int) -> None:
        """Append that the breakpoint at `num_tokens` is computed and pinned."""
        self._open_requests[request_id].committed.add(num_tokens)
        self._open.append({"committed": request_id, "tokens": num_tokens})

    def produced(self, request_id: str, output_tokens: int) -> None:
        """Note that the request has `output_tokens` output tokens in all; `flush` appends it."""
        self._open_requests[request_id].output_tokens = output_tokens
        self._produced[request_id] = output_tokens

    def finished(self, record: EngineRecord) -> None:
        """Append the final record of a request that ended."""
        self._open_requests.pop(record.request_id, None)
        offset = self._closed.append(to_plain(EngineRecord, record))
        self._places[record.request_id] = self._closed.number << _OFFSET_BITS | offset

    def reported(self, report: LeaseReport) -> None:
        """Append a lease report."""
        self._leases.append(to_plain(LeaseReport, report))

    def flush(self) -> None:
        """Write all facts since the last call; frames with them may be sent afterwards.

        Raises JournalError; the engine must stop then.
        """
        if self._produced:
            self._open.append({"produced": self._produced})
            self._produced = {}
        # Closed first: a final record makes the open facts of its request irrelevant.
        if any([self._closed.write(), self._open.write(), self._leases.write()]):
            self._syncer.wrote()
        if self._closed.size >= self._segment_bytes:
            self._closed = self._rotated(self._closed)
        if self._leases.size >= self._segment_bytes:
            self._leases = self._rotated(self._leases)
        if self._open.size >= self._segment_bytes:
            self._rotate_open()

    def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord]:
        """Return the closed records of these requests, as far as there are.

        One that cannot be read is left out and counted. Raises JournalError if writing fails.
        """
        self.flush()
        records = {}
        for request_id in request_ids:
            place = self._places.get(request_id)
            record = None if place is None else self._record_at(place)
            if record is not None:
                records[request_id] = record
        return records

    def recent(self, limit: int) -> list[str]:
        """Return the last `limit` requests that have a closed record, newest first."""
        return list(islice(reversed(self._places), limit))

    def stats(self) -> dict[str, float]:
        """Return counters by metric name."""
        return {"journal_lines_unreadable_total": self._num_unreadable}

    def last_reports(self, limit: int) -> list[LeaseReport]:
        """Return the newest report of each of the last `limit` reported leases, newest last.

        Reads segments from the newest backwards until there are enough. Raises JournalError.
        """
        newest: dict[str, LeaseReport] = {}
        for number in reversed(segment_numbers(self._folder, "lease")):
            lines = [data for _, data in read_segment(segment_path(self._folder, "lease", number))]
            for data in reversed(lines):
                with suppress(FrameError):  # another version wrote it: its lease ended long ago
                    report: LeaseReport = from_plain(LeaseReport, data)
                    newest.setdefault(report.lease_id, report)
                if len(newest) == limit:
                    return list(newest.values())[::-1]
        return list(newest.values())[::-1]

    def __contains__(self, request_id: str) -> bool:
        """Whether this request was ever admitted, as far back as records are kept."""
        return request_id in self._places or request_id in self._open_requests

    def close(self) -> None:
        """Write and sync everything, then unlock the folder. Raises JournalError."""
        with ExitStack() as stack:
            stack.callback(os.close, self._lock)
            stack.callback(self._open.close)
            stack.callback(self._closed.close)
            stack.callback(self._leases.close)
            stack.callback(self._syncer.close)
            self.flush()

    def _recover(self) -> None:
        """Index the closed records, close requests left open, then start new segments."""
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

    def _left_open(self, numbers: list[int]) -> list["_OpenRequest"]:
        """Return the requests in open segments that have no closed record."""
        requests: dict[str, _OpenRequest] = {}
        for number in numbers:
            path = segment_path(self._folder, "open", number)
            for _, line in read_segment(path):
                if "admitted" in line:
                    record = _record(line["admitted"], path)
                    requests[record.request_id] = _OpenRequest(record, record.output_tokens)
                elif "produced" in line:
                    for request_id, output_tokens in line["produced"].items():
                        if request_id in requests:
                            requests[request_id].output_tokens = output_tokens
                elif line["committed"] in requests:
                    requests[line["committed"]].committed.add(line["tokens"])
        return [request for id_, request in requests.items() if id_ not in self._places]

    def _rotated(self, full: Segment) -> Segment:
        """Return a new segment after `full`; drop the oldest of its kind."""
        with self._syncer.busy:
            full.sync()
            full.close()
            following = self._next_segment(full.kind)
        self._drop_oldest(full.kind)
        return following

    def _rotate_open(self) -> None:
        """Copy the facts of running requests into a new segment and remove the old one."""
        with self._syncer.busy:
            old, self._open = self._open, self._next_segment("open")
            for request in self._open_requests.values():
                self._open.append({"admitted": to_plain(EngineRecord, request.record_now())})
            self._open.write()
            self._sync()
            old.close()
        self._drop("open", old.number)

    def _drop_oldest(self, kind: str) -> None:
        """Remove the oldest segments of a kind beyond KEPT_BYTES, and their index entries."""
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

    def _record_at(self, place: int) -> EngineRecord | None:
        path = segment_path(self._folder, "closed", place >> _OFFSET_BITS)
        try:
            return _record(read_line(path, place & ((1 << _OFFSET_BITS) - 1)), path)
        except JournalError as error:  # the other records and the requests that run are whole
            log.warning("journal_line_unreadable: %s", error)
            self._num_unreadable += 1
            return None


@dataclass(slots=True)
class _OpenRequest:
    """An admitted request that has not ended: its record at admission and the facts since."""

    record: EngineRecord
    output_tokens: int
    committed: set[int] = field(default_factory=set)

    def record_now(self) -> EngineRecord:
        """Return the record with the facts up to now."""
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


def _engine_id(lock: int) -> str:
    """Return the engine's id, kept in the lock file, which the first start of a folder writes.

    A damaged one is replaced: it only tells whether this journal can have a request's record.
    """
    found = os.pread(lock, ENGINE_ID_BYTES + 1, 0)
    if ENGINE_ID.fullmatch(found):
        return found.decode("ascii")
    made = f"engine_{secrets.token_hex(16)}"
    os.ftruncate(lock, 0)
    os.pwrite(lock, made.encode("ascii"), 0)
    os.fsync(lock)
    return made


def _locked(folder: Path) -> int:
    """Lock the folder and return the descriptor; closing it, or the process's end, unlocks."""
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
