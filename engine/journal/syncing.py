"""A thread that syncs the journal within 100 ms of each write, however long a step takes."""

import threading
from collections.abc import Callable

from engine.errors import JournalError

SYNC_SECONDS = 0.1  # writes that a power cut may lose
_GATHER_SECONDS = SYNC_SECONDS / 2  # wait for further writes; the other half is for the disk


class Syncer:
    """Calls `sync` soon after each `wrote`, once for all writes of the last 50 ms.

    It holds the lock `busy` meanwhile; take `busy` to replace a file.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        """Start the thread. `sync` raises JournalError when it fails."""
        self.busy = threading.Lock()
        self._sync = sync
        self._written = threading.Event()
        self._closing = threading.Event()
        self._failure: JournalError | None = None
        self._thread = threading.Thread(target=self._run, name="journal sync", daemon=True)
        self._thread.start()

    def wrote(self) -> None:
        """Ask for a sync. Raises the JournalError of an earlier sync that failed."""
        if self._failure is not None:
            raise self._failure
        self._written.set()

    def close(self) -> None:
        """Sync once more and end the thread. Raises the JournalError of a failed sync."""
        self._closing.set()
        self._written.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        is_last = False
        try:
            while not is_last:
                self._written.wait()
                self._written.clear()  # before the sync: a later write asks for another one
                is_last = self._closing.wait(_GATHER_SECONDS)
                with self.busy:
                    self._sync()
        except JournalError as error:
            self._failure = error
