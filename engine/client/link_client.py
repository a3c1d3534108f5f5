"""EngineClient over a socket, in asyncio: connects, reconnects, sends requests, routes events."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any, NoReturn

from engine.client.interface import EngineClient, RequestStream
from engine.client.request_stream import LinkRequestStream
from engine.errors import EngineLost, FrameError
from engine.link.address import TcpAddress, parse_address, short_path, tune
from engine.link.frames import (
    Abort,
    ClientMessage,
    EngineMessage,
    Fault,
    Found,
    FrameReader,
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
    encode_client,
)
from engine.protocol import (
    PROTOCOL_VERSION,
    EngineInfo,
    EngineRecord,
    Event,
    GenerateRequest,
    LeaseReport,
)

FIRST_DELAY_SECONDS = 0.05  # before the first reconnect; an engine may have restarted already
MAX_DELAY_SECONDS = 1.0  # so a restarted engine is found within a second
GREETING_SECONDS = 30.0  # the engine may have to finish a step before its Hello
CALL_SECONDS = 30.0  # likewise before a reply
LOOKUP_IDS = 128  # ids in one Lookup frame; a longer lookup sends several
MAX_UNREAD_REPORTS = 10_000  # then the oldest is dropped; a later one has larger totals
MAX_UNSENT_BYTES = 64 << 20  # an engine this far behind is not reading
_CHUNK_BYTES = 256 << 10


def connect_engine(url: str) -> EngineClient:
    """Return a client that stays connected to `url`, `unix:PATH` or `tcp://HOST:PORT`.

    Call it inside a running event loop; `await client.ready(...)` waits for the first link. Raises
    AddressError for a malformed URL.
    """
    return LinkClient(url)


class LinkClient:
    """An EngineClient; one task connects, reads frames and reconnects."""

    def __init__(self, url: str) -> None:
        """Start connecting."""
        self._url = url
        self._address = parse_address(url)
        self._info: EngineInfo | None = None
        self._linked = asyncio.Event()
        self._trouble = "not connected yet"
        self._writer: asyncio.StreamWriter | None = None
        # Weak: a stream without a consumer is collected, and its request aborted.
        self._streams: weakref.WeakValueDictionary[str, LinkRequestStream] = (
            weakref.WeakValueDictionary()
        )
        self._call_ids = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._reports: deque[LeaseReport] = deque(maxlen=MAX_UNREAD_REPORTS)
        self._reported = asyncio.Event()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._keep_linked(), name=f"engine link {url}")

    async def ready(self, timeout_seconds: float) -> EngineInfo:
        """Wait for a live link and return the engine's info. Raises EngineLost on timeout."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._info is None:
                    await self._linked.wait()
        except TimeoutError:
            raise EngineLost(f"No engine at {self._url}: {self._trouble}") from None
        return self._info

    @property
    def info(self) -> EngineInfo | None:
        """The connected engine's info; None while there is no link."""
        return self._info

    def generate(self, request: GenerateRequest) -> RequestStream:
        """Submit a request and return its stream. Raises EngineLost if there is no link now."""
        request_id = request.request_id
        assert request_id not in self._streams, f"Request id in use: {request_id}"
        writer = self._writer
        if self._info is None or writer is None:
            raise EngineLost(f"No engine at {self._url}: {self._trouble}")
        self._send(Submit(request), writer)
        stream = LinkRequestStream(
            request_id,
            send=lambda message: self._send(message, writer),
            abandon=lambda: self._abandon(request_id, writer),
        )
        self._streams[request_id] = stream
        return stream

    async def lookup(self, request_ids: Sequence[str]) -> dict[str, EngineRecord | None]:
        """Return the closed records of these requests; see `EngineClient`. Raises EngineLost."""
        records: dict[str, EngineRecord | None] = {}
        for start in range(0, len(request_ids), LOOKUP_IDS):
            ids = tuple(request_ids[start : start + LOOKUP_IDS])
            records |= await self._call(Lookup(next(self._call_ids), ids))
        return records

    async def recent_requests(self, limit: int) -> list[str]:
        """Return the last requests that have a closed record, newest first. Raises EngineLost."""
        request_ids: tuple[str, ...] = await self._call(Recent(next(self._call_ids), limit))
        return list(request_ids)

    async def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name. Raises EngineLost."""
        gauges: dict[str, float] = await self._call(Stats(next(self._call_ids)))
        return gauges

    async def unpin(
        self, *, lease_ids: Sequence[str] = (), namespaces: Sequence[bytes] = ()
    ) -> int:
        """End leases by id and by namespace; see `EngineClient`. Raises EngineLost."""
        query = Unpin(next(self._call_ids), tuple(lease_ids), tuple(namespaces))
        num_leases: int = await self._call(query)
        return num_leases

    async def lease_reports(self) -> AsyncIterator[LeaseReport]:
        """Iterate over the engine's lease reports; see `EngineClient`."""
        while True:
            while self._reports:
                yield self._reports.popleft()
            if self._is_closed:
                return
            self._reported.clear()
            await self._reported.wait()

    async def close(self) -> None:
        """End the link and every stream on it."""
        self._trouble = "this client was closed"
        self._is_closed = True
        self._reported.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _call(self, query: Lookup | Recent | Stats | Unpin) -> Any:
        """Send a frame and return the reply with the same `call` number."""
        if self._info is None or self._writer is None:
            raise EngineLost(f"No engine at {self._url}: {self._trouble}")
        reply = self._loop.create_future()
        self._calls[query.call] = reply
        try:
            self._send(query, self._writer)
            async with asyncio.timeout(CALL_SECONDS):
                return await reply
        except TimeoutError:
            raise EngineLost(f"No answer from {self._url} in {CALL_SECONDS:.0f} s") from None
        finally:
            del self._calls[query.call]

    async def _keep_linked(self) -> None:
        """Connect, read until the link ends, reconnect; the delay doubles while this fails."""
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                await self._run_link()
            except (OSError, FrameError, EngineLost) as error:  # TimeoutError is an OSError
                self._trouble = str(error) or "it does not answer"
            finally:
                was_linked = self._linked.is_set()
                self._forget_link()
            delay = FIRST_DELAY_SECONDS if was_linked else min(2 * delay, MAX_DELAY_SECONDS)
            await asyncio.sleep(delay)

    async def _run_link(self) -> NoReturn:
        """Open one link and read it until it ends. Raises the reason."""
        reader, writer = await self._open()
        frames = FrameReader(EngineMessage)
        try:
            self._send(Hello(), writer)
            async with asyncio.timeout(GREETING_SECONDS):
                while not self._linked.is_set():
                    self._take(frames, await reader.read(_CHUNK_BYTES), writer)
            while True:
                self._take(frames, await reader.read(_CHUNK_BYTES), writer)
        finally:
            writer.transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._address, TcpAddress):
            streams = await asyncio.open_connection(self._address.host, self._address.port)
            tune(streams[1].get_extra_info("socket"))
            return streams
        with short_path(self._address.path) as name:
            return await asyncio.open_unix_connection(name)

    def _take(self, frames: FrameReader, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not data:
            raise EngineLost("the engine closed the link")
        for message in frames.feed(data):
            self._take_message(message, writer)

    def _take_message(self, message: EngineMessage, writer: asyncio.StreamWriter) -> None:
        match message:
            case StepFrame(events):
                for event in events:
                    self._deliver(event)
            case Reports(reports):
                self._reports.extend(reports)
                self._reported.set()
            case (
                Found(call, reply)
                | RecentIds(call, reply)
                | Gauges(call, reply)
                | Unpinned(call, reply)
            ):
                if (waiting := self._calls.get(call)) is not None and not waiting.done():
                    waiting.set_result(reply)
            case Hello(version, info):
                if version != PROTOCOL_VERSION or info is None:
                    raise EngineLost(f"the engine speaks version {version}")
                self._info, self._writer = info, writer
                self._linked.set()
            case Fault(reason):
                raise EngineLost(f"the engine refused the link: {reason}")

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None:
            stream.deliver(event)
        if stream is not None and stream.has_ended:
            del self._streams[event.request_id]

    def _forget_link(self) -> None:
        """End all streams and calls of a link that has ended. Idempotent."""
        self._info = self._writer = None
        self._linked.clear()
        reason = f"Lost the engine at {self._url}: {self._trouble}"
        for stream in list(self._streams.values()):
            stream.lose(reason)
        self._streams.clear()
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineLost(reason))

    def _send(self, message: ClientMessage, writer: asyncio.StreamWriter) -> None:
        """Write without waiting; on a link that has ended this does nothing."""
        if writer.is_closing():
            return
        writer.write(encode_client(message))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            writer.transport.abort()

    def _abandon(self, request_id: str, writer: asyncio.StreamWriter) -> None:
        """Abort a request whose stream was garbage-collected. Safe from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
            self._loop.call_soon_threadsafe(self._send, Abort(request_id), writer)
