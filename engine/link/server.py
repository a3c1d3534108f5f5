"""The engine's server: one thread reads all links, steps the core, writes the journal and replies.

A frame is sent only after the journal has the facts in it. Nothing that a client sends ends the
loop. The end of a link aborts its requests.
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
    Recent,
    RecentIds,
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
MAX_LOOKUP_IDS = 128  # keeps a reply well below MAX_UNSENT_BYTES
MAX_RECENT_IDS = 1_000  # likewise
MAX_REQUEST_ID_CHARS = 256  # likewise: every event and record carries one
MAX_REPORTS_AGAIN = 10_000  # leases; the journal keeps more
MAX_SLEEP_MS = 60_000  # select() takes no more than 24 days
HELLO_MS = 10_000  # a link that says nothing so long is ended: it keeps a place from others


class EngineServer:
    """The server loop. Call `run` in one thread; `stop` and `wake` are safe from any other."""

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        listener: socket.socket,
        journal: Journal,
        clock: Callable[[], int],
    ) -> None:
        """`clock` is monotonic, in milliseconds; the listener is non-blocking."""
        self._core, self._info, self._journal, self._clock = core, info, journal, clock
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._links: set[ClientSocket] = set()
        self._link_by_request: dict[str, ClientSocket] = {}
        self._outbox: defaultdict[ClientSocket, list[Event]] = defaultdict(list)
        # The newest report of each lease, for later links.
        reports = journal.last_reports(MAX_REPORTS_AGAIN)
        self._reports: dict[str, LeaseReport] = {report.lease_id: report for report in reports}
        self._queries: list[tuple[ClientSocket, Lookup | Recent | Stats | Unpinned]] = []
        self._stopping = False
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._read_wakes)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve until `stop`; then abort all requests, write their records and end every link.

        Raises JournalError when the journal cannot be written.
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
        """Wake the loop so that it reads its clock again. Safe from other threads."""
        with suppress(OSError):  # full: a wake-up is pending; closed: the loop has ended
            self._waker.send(b".")

    def stop_at_end_of(self, fd: int) -> None:
        """Stop at the end of the pipe `fd`. Raises SettingError if it is not a pipe."""

        def read(_mask: int) -> None:
            if not os.read(fd, 4096):
                self._selector.unregister(fd)
                self._stopping = True

        try:
            self._selector.register(fd, selectors.EVENT_READ, read)
        except PermissionError as error:
            raise SettingError("Standard input must be a pipe, to wait for its end.") from error

    def _wait(self) -> None:
        """Sleep until a socket is ready or a deadline is due, then run the sockets' handlers."""
        for key, mask in self._selector.select(self._timeout_seconds()):
            key.data(mask)

    def _timeout_seconds(self) -> float | None:
        if self._core.has_work:
            return 0
        silent_ms = [link.opened_ms + HELLO_MS for link in self._links if not link.is_open]
        due_ms = min([*silent_ms, self._core.next_expiry_ms()], key=_or_never)
        if due_ms is None:
            return None
        return min(max(0, due_ms - self._clock()), MAX_SLEEP_MS) / 1000

    def _turn(self) -> None:
        """Run one step, write its facts to the journal, then send its frames."""
        for event in self._core.step(self._clock()):
            if link := self._link_of(event):
                self._outbox[link].append(event)
        self._journal.flush()
        for link, events in self._outbox.items():
            link.send(StepFrame(tuple(events)))
        self._outbox.clear()
        self._send_reports()
        self._reply()
        self._update_links()

    def _link_of(self, event: Event) -> ClientSocket | None:
        """Return the link that submitted the event's request; None if it has ended."""
        if not isinstance(event, Finished | Rejected):
            return self._link_by_request.get(event.request_id)
        link = self._link_by_request.pop(event.request_id, None)
        if link:
            link.request_ids.discard(event.request_id)
        return link

    def _accept(self, _mask: int) -> None:
        with suppress(OSError):  # the client disconnected before accept()
            connection, _ = self._listener.accept()
            tune(connection)
            link = ClientSocket(connection, opened_ms=self._clock())
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
            case Lookup() | Recent() | Stats() | Unpin():
                self._queries.append((link, self._prepare(message)))

    def _prepare(
        self, query: Lookup | Recent | Stats | Unpin
    ) -> Lookup | Recent | Stats | Unpinned:
        """Return what `_reply` replies to after the step; Unpin is executed at once."""
        if isinstance(query, Lookup) and len(query.request_ids) > MAX_LOOKUP_IDS:
            raise FrameError(f"A lookup asks for at most {MAX_LOOKUP_IDS} requests.")
        if isinstance(query, Recent) and not 0 <= query.limit <= MAX_RECENT_IDS:
            raise FrameError(f"At most {MAX_RECENT_IDS} recent requests are listed.")
        if not isinstance(query, Unpin):
            return query
        num_leases = self._core.end_leases(
            lease_ids=query.lease_ids, namespaces=query.namespaces, now_ms=self._clock()
        )
        return Unpinned(query.call, num_leases)

    def _submit(self, link: ClientSocket, request: GenerateRequest) -> None:
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise FrameError(f"A request id has at most {MAX_REQUEST_ID_CHARS} characters.")
        if (rejected := self._rejected(request)) is not None:
            self._outbox[link].append(rejected)
            return
        self._link_by_request[request.request_id] = link
        link.request_ids.add(request.request_id)

    def _rejected(self, request: GenerateRequest) -> Rejected | None:
        request_id = request.request_id
        if request_id in self._link_by_request or request_id in self._journal:
            # The journal has the record of its first use; a second one would overwrite it.
            return Rejected(request_id, "invalid_request", f"Used request id: {request_id}")
        return self._core.submit(request, self._clock())

    def _send_reports(self) -> None:
        """Send new lease reports to every client, and keep them for later ones."""
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
        """Send the engine's info and the kept lease reports again; repeated reports do no harm.

        A gateway may have stopped before it stored them, and the reports that a previous engine
        process wrote as it stopped have not been sent yet.
        """
        link.send(Hello(info=self._info))
        if self._reports:
            link.send(Reports(tuple(self._reports.values())))

    def _reply(self) -> None:
        """Reply to the turn's calls, after its step and its journal writes.

        A request whose link ended in this turn has its record by now, so a lookup always finds a
        request as running or as recorded.
        """
        for link, query in self._queries:
            if link.ended:  # it does not read its replies
                continue
            if isinstance(query, Unpinned):
                link.send(query)
                continue
            if isinstance(query, Stats):
                link.send(Gauges(query.call, self._core.stats() | self._journal.stats()))
                continue
            if isinstance(query, Recent):
                link.send(RecentIds(query.call, tuple(self._journal.recent(query.limit))))
                continue
            records: dict[str, EngineRecord | None] = {
                request_id: None
                for request_id in query.request_ids
                if self._core.state_of(request_id) is not None
            }
            records.update(self._journal.lookup(query.request_ids))
            link.send(Found(query.call, records))
        self._queries.clear()

    def _update_links(self) -> None:
        """Drop the links that ended or say nothing; watch those with unsent bytes for writing."""
        silent_since_ms = self._clock() - HELLO_MS
        for link in self._links:
            if not (link.is_open or link.ended) and link.opened_ms <= silent_since_ms:
                link.refuse(f"No hello in {HELLO_MS // 1000} seconds.")
        for link in [link for link in self._links if link.ended]:
            self._drop(link)
        for link in self._links:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
            key = self._selector.get_key(link.connection)
            if key.events != events:
                self._selector.modify(link.connection, events, key.data)

    def _drop(self, link: ClientSocket) -> None:
        """Close a link and abort its requests; the next step writes their records."""
        for request_id in link.request_ids:
            self._core.abort(request_id)
            self._link_by_request.pop(request_id, None)
        self._outbox.pop(link, None)
        self._links.discard(link)
        self._selector.unregister(link.connection)
        link.close()

    def _read_wakes(self, _mask: int) -> None:
        self._woken.recv(4096)

    def _end(self) -> None:
        """Abort all requests, and step until their records are written and sent."""
        for request_id in self._link_by_request:
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


def _or_never(due_ms: int | None) -> float:
    return float("inf") if due_ms is None else due_ms
