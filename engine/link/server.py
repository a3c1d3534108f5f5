"""Serves one engine core to its clients: a single-threaded loop around `core.step`.

One turn: wait, read every link, step the core, write the journal, answer. Nothing that a client
sends ends the loop, and no frame leaves before the journal has the facts in it. A link's end aborts
its requests.
"""

import os
import selectors
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from engine.core import EngineCore
from engine.errors import FrameError, SettingError
from engine.journal.journal import Journal
from engine.link.address import tune
from engine.link.client_socket import ClientSocket
from engine.link.frames import (
    Abort,
    ClientMessage,
    Finish,
    Found,
    Gauges,
    Hello,
    Lookup,
    Reports,
    Stats,
    StepFrame,
    Submit,
    Unpin,
    Unpinned,
)
from engine.protocol import (
    EngineInfo,
    EngineRecord,
    Event,
    Finished,
    GenerateRequest,
    LeaseReport,
    Rejected,
)

MAX_LINKS = 64  # a gateway needs one
MAX_LOOKUP_IDS = 4_096  # keeps an answer well under a frame
MAX_REQUEST_ID_CHARS = 256  # likewise: every event and record carries one
MAX_REPORTS_AGAIN = 10_000  # leases; the journal keeps more


class EngineServer:
    """The loop. `run` in any one thread; `stop` and `wake` from any other."""

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        listener: socket.socket,
        journal: Journal,
        clock: Callable[[], int],
    ) -> None:
        """`clock` is monotonic, in milliseconds; the listener does not block."""
        self._core, self._info, self._journal, self._clock = core, info, journal, clock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._links: set[ClientSocket] = set()
        self._owners: dict[str, ClientSocket] = {}
        self._outbox: defaultdict[ClientSocket, list[Event]] = defaultdict(list)
        # The newest report of each lease, for links to come.
        reports = journal.last_reports(MAX_REPORTS_AGAIN)
        self._reports: dict[str, LeaseReport] = {report.lease_id: report for report in reports}
        self._questions: list[tuple[ClientSocket, Lookup | Stats | Unpinned]] = []
        self._stopping = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._read_wakes)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until `stop`; then abort what runs, close its records and end every link.

        Raises JournalError when facts can no longer be written.
        """
        try:
            while not self._stopping:
                self._wait()
                self._turn()
            self._end()
        finally:
            self._close()

    def stop(self) -> None:
        """End `run` after the current step. Safe from other threads and from signal handlers."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Make the loop look at its clock again. Safe from other threads."""
        with suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._waker.send(b".")

    def stop_at_end_of(self, fd: int) -> None:
        """Stop when the pipe `fd` reaches its end. Raises SettingError if it is no pipe."""

        def read(_mask: int) -> None:
            if not os.read(fd, 4096):
                self._selector.unregister(fd)
                self._stopping = True

        try:
            self._selector.register(fd, selectors.EVENT_READ, read)
        except PermissionError as error:
            raise SettingError("Standard input must be a pipe, to wait for its end.") from error

    def _wait(self) -> None:
        """Sleep until something happened or is due, and let each event's handler read it."""
        for key, mask in self._selector.select(self._timeout_seconds()):
            key.data(mask)

    def _timeout_seconds(self) -> float | None:
        if self._core.has_work:
            return 0
        due_ms = self._core.next_expiry_ms()
        return None if due_ms is None else max(0, due_ms - self._clock()) / 1000

    def _turn(self) -> None:
        """StepFrame, write the facts down, then tell them."""
        for event in self._core.step(self._clock()):
            if link := self._owner_of(event):
                self._outbox[link].append(event)
        self._journal.flush()
        for link, events in self._outbox.items():
            link.send(StepFrame(tuple(events)))
        self._outbox.clear()
        self._send_reports()
        self._answer()
        self._tend_links()

    def _owner_of(self, event: Event) -> ClientSocket | None:
        """The link that waits for this event, if it is still there."""
        if not isinstance(event, Finished | Rejected):
            return self._owners.get(event.request_id)
        link = self._owners.pop(event.request_id, None)
        if link:
            link.request_ids.discard(event.request_id)
        return link

    def _accept(self, _mask: int) -> None:
        with suppress(OSError):  # the client left between the event and here
            connection, _ = self._listener.accept()
            tune(connection)
            link = ClientSocket(connection)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._io, link))
            self._links.add(link)
            if len(self._links) > MAX_LINKS:
                link.refuse(f"Too many links: {MAX_LINKS}")

    def _io(self, link: ClientSocket, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            link.send_unsent()
        if mask & selectors.EVENT_READ:
            try:
                for message in link.receive():
                    self._take(link, message)
            except FrameError as error:
                link.refuse(str(error))
        if link.ended:
            self._drop(link)

    def _take(self, link: ClientSocket, message: ClientMessage) -> None:
        match message:
            case Hello():
                self._greet(link)
            case Submit(request):
                self._submit(link, request)
            case Abort(request_id):
                if request_id in link.request_ids:
                    self._core.abort(request_id)
            case Finish(request_id, output_tokens):
                if output_tokens < 0:
                    raise FrameError(f"output_tokens is negative: {output_tokens}")
                if request_id in link.request_ids:
                    self._core.finish(request_id, output_tokens)
            case Lookup() | Stats() | Unpin():
                self._questions.append((link, self._heard(message)))

    def _heard(self, question: Lookup | Stats | Unpin) -> Lookup | Stats | Unpinned:
        """What `_answer` is to answer after the step; an Unpin is done at once."""
        if isinstance(question, Lookup) and len(question.request_ids) > MAX_LOOKUP_IDS:
            raise FrameError(f"A lookup asks for at most {MAX_LOOKUP_IDS} requests.")
        if not isinstance(question, Unpin):
            return question
        num_leases = self._core.end_leases(
            lease_ids=question.lease_ids, namespaces=question.namespaces, now_ms=self._clock()
        )
        return Unpinned(question.call, num_leases)

    def _submit(self, link: ClientSocket, request: GenerateRequest) -> None:
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise FrameError(f"A request id has at most {MAX_REQUEST_ID_CHARS} characters.")
        if (rejected := self._rejected(request)) is not None:
            self._outbox[link].append(rejected)
            return
        self._owners[request.request_id] = link
        link.request_ids.add(request.request_id)

    def _rejected(self, request: GenerateRequest) -> Rejected | None:
        request_id = request.request_id
        if request_id in self._owners or request_id in self._journal:
            # Its first use is on record; a second one would make that record a lie.
            return Rejected(request_id, "invalid_request", f"Used request id: {request_id}")
        return self._core.submit(request, self._clock())

    def _send_reports(self) -> None:
        """Tell every client what leases cost, and keep it for those to come."""
        reports = self._core.take_reports()
        for report in reports:
            self._reports.pop(report.lease_id, None)
            self._reports[report.lease_id] = report
        while len(self._reports) > MAX_REPORTS_AGAIN:
            del self._reports[next(iter(self._reports))]
        if reports:
            for link in [link for link in self._links if link.is_open]:
                link.send(Reports(tuple(reports)))

    def _greet(self, link: ClientSocket) -> None:
        """Say what the engine is, and again what leases have cost: twice does no harm.

        A gateway may have died before it kept what it heard; none heard the last engine stop.
        """
        link.send(Hello(info=self._info))
        if self._reports:
            link.send(Reports(tuple(self._reports.values())))

    def _answer(self) -> None:
        """Answer the turn's questions, after its step and with its facts in the journal.

        By now a request whose link ended in the same turn is closed, so a lookup never finds it
        neither running nor recorded.
        """
        for link, question in self._questions:
            if link.ended:  # it asked more than it reads: nobody waits for the rest
                continue
            if isinstance(question, Unpinned):
                link.send(question)
                continue
            if isinstance(question, Stats):
                link.send(Gauges(question.call, self._core.stats()))
                continue
            records: dict[str, EngineRecord | None] = {
                request_id: None
                for request_id in question.request_ids
                if self._core.state_of(request_id) is not None
            }
            records.update(self._journal.lookup(question.request_ids))
            link.send(Found(question.call, records))
        self._questions.clear()

    def _tend_links(self) -> None:
        """Drop the links that ended while sending; wait for room on those that are behind."""
        for link in [link for link in self._links if link.ended]:
            self._drop(link)
        for link in self._links:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
            key = self._selector.get_key(link.connection)
            if key.events != events:
                self._selector.modify(link.connection, events, key.data)

    def _drop(self, link: ClientSocket) -> None:
        """Close a link and abort its requests; their records close in the next step."""
        for request_id in link.request_ids:
            self._core.abort(request_id)
            self._owners.pop(request_id, None)
        self._outbox.pop(link, None)
        self._links.discard(link)
        self._selector.unregister(link.connection)
        link.close()

    def _read_wakes(self, _mask: int) -> None:
        self._woken.recv(4096)

    def _end(self) -> None:
        """Abort everything; the last step closes the records and tells the clients."""
        for request_id in self._owners:
            self._core.abort(request_id)
        while self._core.has_work:
            self._turn()
        self._core.stop(self._clock())
        self._journal.flush()
        self._send_reports()

    def _close(self) -> None:
        for link in self._links:
            link.close()
        self._selector.close()
        self._listener.close()
        self._waker.close()
        self._woken.close()
