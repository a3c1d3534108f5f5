"""The writer thread: one connection, many operations in one commit (group commit).

An fsync takes milliseconds, and a hot account row stays locked during it. So operations that arrive
during a commit share the next one. docs/decisions/0001 has the reasons.

An operation that its caller has given up does nothing when its turn comes. The thread claims it
inside the transaction, when it has the write lock, just before it runs it. Until then `cancel`
takes it back; from then on the caller waits for the outcome.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from typing_extensions import override

from billing.errors import WriteGivenUp, WriterUnavailable

T = TypeVar("T")

BATCH_MAX = 256  # operations a commit; more only adds latency to the first of them
BACKLOG_MAX = 10_000  # queued operations; beyond it the database is not keeping up
ATTEMPTS_MAX = 10  # runs of one batch before its callers get the conflict as an error

# PostgreSQL: serialization_failure, deadlock_detected, lock_not_available (our lock_timeout).
CONFLICT_SQLSTATES = frozenset({"40001", "40P01", "55P03"})


class _Job(Future[Any]):
    """The future of an operation, and its result or error in the current attempt."""

    def __init__(self, operation: Callable[[Connection], Any]) -> None:
        super().__init__()
        self._operation = operation
        self._is_unwanted = False
        self._value: Any = None
        self.error: Exception | None = None

    @override
    def cancel(self) -> bool:
        """Take the operation back if it has not begun; otherwise it does not begin again."""
        if super().cancel():
            return True
        self._is_unwanted = True
        return False

    def run(self, conn: Connection) -> None:
        """Run in a savepoint, so that a failure undoes this operation alone."""
        self._value, self.error = None, None
        if not self._claim():
            return
        savepoint = conn.begin_nested()
        try:
            self._value = self._operation(conn)
            savepoint.commit()
        except Exception as error:
            if is_conflict(error) or is_connection_lost(error):
                raise  # the transaction is gone, and with it the whole batch
            savepoint.rollback()
            self.error = error

    def resolve(self) -> None:
        """Resolve the future, unless it was taken back; only called once the outcome is final."""
        if not self.running() and not self._claim():
            return
        if self.error is None:
            self.set_result(self._value)
        else:
            self.set_exception(self.error)

    def fail(self, error: Exception) -> None:
        """Resolve the future with an error, unless it is resolved."""
        if not self.done():
            self.error = error
            self.resolve()

    def _claim(self) -> bool:
        """Return whether the operation is to run: its caller still wants it."""
        if not self.running():
            return not self.cancelled() and self.set_running_or_notify_cancel()
        if self._is_unwanted:  # an earlier attempt was undone
            self.error = WriteGivenUp()
        return self.error is None


class Writer:
    """Runs submitted operations in order, up to BATCH_MAX in one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: queue.Queue[_Job | None] = queue.Queue(BACKLOG_MAX)
        self._gate = threading.Lock()  # no job may be queued behind the closing mark
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="billing-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[Connection], T]) -> Future[T]:
        """Queue an operation; its future resolves after the commit, or with its own error.

        Cancel the future to give the operation up. If `cancel` returns False the operation has
        begun, and the future still resolves: with its outcome, or with WriteGivenUp if it was
        undone. Raises WriterUnavailable if nothing can be queued.
        """
        job = _Job(operation)
        with self._gate:
            if self._closed:
                raise WriterUnavailable("The database writer is closed")
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                raise WriterUnavailable("The database writer has too much to do") from None
        return job

    def close(self) -> None:
        """Commit everything submitted so far, then end the thread."""
        with self._gate:
            already_closed, self._closed = self._closed, True
        if not already_closed:
            self._jobs.put(None)
        self._thread.join()
        self._engine.dispose()

    def _work(self) -> None:
        batch: list[_Job] = []
        try:
            while batch := self._next_batch():
                self._commit(batch)
        finally:
            self._refuse_the_rest(batch)

    def _next_batch(self) -> list[_Job]:
        """Wait for a job and take those queued behind it; return none once closed and drained."""
        batch: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == BATCH_MAX:
                return batch
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._jobs.put(None)  # the closing mark is read again after this batch
        return batch

    def _commit(self, batch: list[_Job]) -> None:
        """Run a batch in one transaction, and run it again as a whole if it was certainly undone.

        If the connection is lost during the commit itself, the outcome is unknown. The callers get
        the error and may repeat: their operations are idempotent.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            committing = False
            try:
                with self._engine.begin() as conn:
                    for job in batch:
                        job.run(conn)
                    committing = True
            except Exception as error:  # noqa: BLE001  # the callers' error; the thread goes on
                undone = is_conflict(error) or (is_connection_lost(error) and not committing)
                if undone and attempt < ATTEMPTS_MAX:
                    continue
                for job in batch:
                    job.error = error
            break
        for job in batch:
            job.resolve()

    def _refuse_the_rest(self, unfinished: list[_Job]) -> None:
        """Fail the futures that can no longer be resolved; also after the thread has crashed."""
        with self._gate:
            self._closed = True
        stopped = WriterUnavailable("The database writer has stopped")
        for job in unfinished:
            job.fail(stopped)
        while not self._jobs.empty():
            if (waiting := self._jobs.get_nowait()) is not None:
                waiting.fail(stopped)


def is_connection_lost(error: BaseException) -> bool:
    """Whether the connection was lost; what was not committed is undone."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def is_conflict(error: BaseException) -> bool:
    """Whether another process's write conflicted; the same batch can succeed if repeated."""
    if not isinstance(error, DBAPIError):
        return False
    cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        return cause.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    return getattr(cause, "sqlstate", None) in CONFLICT_SQLSTATES
