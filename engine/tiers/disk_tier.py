"""The disk tier: one file for each lease that persists, written by a background thread.

The engine's thread queues copies and reads files back; the writer thread hashes, writes, syncs and
renames. One lock guards the table of files; it is not held while payloads are read or written.
Deadlines are the engine's monotonic milliseconds; only file names hold wall-clock times.
"""

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import LeaseFileCorrupt, LeaseFileError, LeaseFileForeign
from engine.journal.segments import sync_folder
from engine.lease_types import StoredPrefix
from engine.tiers.lease_files import (
    LeaseFile,
    Origin,
    file_name,
    read_manifest,
    read_payload,
    write_lease,
)
from engine.tiers.tier import Recovered

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20  # copies queued for the disk; a single larger one is accepted
CLOSE_SECONDS = 30.0  # for queued writes; a disk that hangs must not block the shutdown
RETRY_MS = 60_000  # no write for this long after a failed one
COUNTERS = (
    "lease_files_written_total",
    "lease_files_failed_total",
    "lease_files_read_total",
    "lease_files_corrupt_total",
    "lease_files_foreign_total",
)


@dataclass(slots=True, eq=False)
class _File:
    """One lease's file, queued or written; `path` is None until it is complete."""

    stored: StoredPrefix
    deadline_ms: int
    num_bytes: int
    path: Path | None = None
    sha256: str = ""
    is_dropped: bool = False
    is_renaming: bool = False


class DiskTier:
    """A Tier on disk. The journal's lock, taken before, keeps a second engine out of the folder."""

    name = "disk"
    keeps_all = False

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        *,
        budget_bytes: int,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
    ) -> None:
        """`clock` is the engine's monotonic one, `wall_clock` dates file names; both in ms."""
        self._folder, self._origin = folder, origin
        self._budget_bytes = budget_bytes
        self._clock, self._wall_clock = clock, wall_clock
        self._files: dict[bytes, _File] = {}
        self._used_bytes = self._queued_bytes = 0
        self._retry_ms: int | None = None
        self._saved: deque[tuple[_File, bool]] = deque()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lease writer", daemon=True)
        self._thread.start()

    def recover(self) -> list[Recovered]:
        """Read every file's header; remove incomplete, foreign and expired files."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._folder.glob("*.tmp"):
                path.unlink()
            files = [file for path in self._folder.glob("*.lease") if (file := self._read(path))]
        except OSError:
            log.exception("lease_folder_unreadable")
            return []
        return [recovered for file in files if (recovered := self._recover_one(file))]

    @property
    def free_bytes(self) -> int:
        """The unused part of the budget."""
        return self._budget_bytes - self._used_bytes

    def accepts(self, num_bytes: int) -> bool:
        """Whether the last write succeeded and the queue has space."""
        if self._retry_ms is not None and self._clock() < self._retry_ms:
            return False
        with self._lock:
            return not self._queued_bytes or self._queued_bytes + num_bytes <= MAX_QUEUED_BYTES

    def save(
        self, stored: StoredPrefix, payload: np.ndarray, *, num_bytes: int, deadline_ms: int
    ) -> None:
        """Queue a lease for the writer."""
        assert num_bytes == payload.nbytes, f"not the size announced: {payload.nbytes}"
        file = _File(stored, deadline_ms, num_bytes)
        with self._lock:
            assert stored.key not in self._files, "saved twice"
            self._files[stored.key] = file
            self._used_bytes += num_bytes
            self._queued_bytes += num_bytes
        self._work.put(lambda: self._write(file, payload))

    def poll(self) -> list[tuple[bytes, bool]]:
        """Return the saves that the writer has ended since the last call."""
        ended = []
        while self._saved:
            file, is_saved = self._saved.popleft()
            if file.is_dropped:
                continue
            if not is_saved:
                self._retry_ms = self._clock() + RETRY_MS
                self.drop(file.stored.key)
            ended.append((file.stored.key, is_saved))
        return ended

    def load(self, key: bytes) -> np.ndarray | None:
        """Return a payload read from its file, or None if it is damaged or unreadable."""
        file = self._files[key]
        assert file.path is not None, "loaded before it was saved"
        try:
            with self._lock:  # the writer may be renaming it
                opened = file.path.open("rb", buffering=0)
            with opened:
                payload = read_payload(opened, file.num_bytes, file.sha256)
            if payload is None:
                log.warning("lease_file_dropped: %s", LeaseFileCorrupt(file.path))
        except OSError as error:
            log.warning("lease_file_unreadable: %s", error)
            payload = None
        self._counts[f"lease_files_{'corrupt' if payload is None else 'read'}_total"] += 1
        return payload

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """Queue a rename to the new deadline; a rename that is already queued takes it over."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return
            file.deadline_ms = deadline_ms
            if file.path is None or file.is_renaming:
                return
            file.is_renaming = True
        self._work.put(lambda: self._rename(file))

    def drop(self, key: bytes) -> None:
        """Remove the file at once; a file still being written is discarded at its end."""
        with self._lock:
            file = self._files.pop(key, None)
            if file is None:
                return
            file.is_dropped = True
            self._used_bytes -= file.num_bytes
            if file.path is not None:
                _remove(file.path)

    def sync(self) -> None:
        """Sync the folder. What expired needs none: its name says until when it may be used."""
        try:
            sync_folder(self._folder)
        except OSError as error:
            log.warning("lease_folder_not_synced: %s", error)

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name."""
        counters = {name: float(self._counts[name]) for name in COUNTERS}
        return counters | {"lease_files": len(self._files), "lease_disk_bytes": self._used_bytes}

    def settle(self) -> None:
        """Wait until all work queued so far is done."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def close(self) -> None:
        """Complete queued work and end the writer thread; the files stay for the next engine."""
        self._work.put(None)
        self._thread.join(CLOSE_SECONDS)

    # The writer's thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _write(self, file: _File, payload: np.ndarray) -> None:
        temporary = self._folder / f"{file.stored.key.hex()}.tmp"
        is_saved = False
        try:
            if not file.is_dropped:
                file.sha256 = write_lease(temporary, file.stored, self._origin, payload)
                is_saved = self._name(file, temporary)
                sync_folder(self._folder)
        except OSError as error:
            log.warning("lease_not_saved: %s", error)
        with self._lock:
            self._queued_bytes -= file.num_bytes
        self._counts[
            f"lease_files_{'written' if is_saved else 'failed'}_total"
        ] += not file.is_dropped
        self._saved.append((file, is_saved))

    def _rename(self, file: _File) -> None:
        try:
            with self._lock:
                file.is_renaming = False
            assert file.path is not None, "renamed before it was saved"
            self._name(file, file.path)
        except OSError as error:  # the file keeps its old, earlier deadline
            log.warning("lease_not_renamed: %s", error)

    def _name(self, file: _File, present: Path) -> bool:
        """Rename a complete file to the name with its deadline; False if the lease was dropped."""
        with self._lock:
            if file.is_dropped:
                _remove(present)
                return False
            left_ms = max(0, file.deadline_ms - self._clock())
            expires_at_ms = self._wall_clock() + left_ms
            name = file_name(file.stored.key, expires_at_ms=expires_at_ms, remaining_ms=left_ms)
            file.path = present.rename(self._folder / name)
        return True

    # Recovery

    def _read(self, path: Path) -> LeaseFile | None:
        try:
            return read_manifest(path, self._origin)
        except LeaseFileError as error:
            log.warning("lease_file_dropped: %s", error)
            kind = "foreign" if isinstance(error, LeaseFileForeign) else "corrupt"
            self._counts[f"lease_files_{kind}_total"] += 1
            _remove(path)
            return None

    def _recover_one(self, found: LeaseFile) -> Recovered | None:
        """Add a file that has not expired; its remaining time counts from now on."""
        # If the wall clock was set back, no lease gets more than the time left at its last rename.
        left_ms = min(found.expires_at_ms - self._wall_clock(), found.remaining_ms)
        stored, num_bytes = found.stored, found.payload_bytes
        if left_ms <= 0 or stored.key in self._files:
            _remove(found.path)
            return None
        file = _File(stored, self._clock() + left_ms, num_bytes, found.path, found.payload_sha256)
        self._files[stored.key] = file
        self._used_bytes += num_bytes
        return Recovered(stored, file.deadline_ms, num_bytes)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # recovery removes it after its expiry
        log.warning("lease_file_not_removed: %s", error)
