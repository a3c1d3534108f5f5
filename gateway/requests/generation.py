"""One request's life, apart from its connection: hold, engine, entries, one settlement or release.

If another request is about to write a prefix that this one could read, it waits before its hold.

A generation runs in a task of its own that no connection can cancel. The response reads its block
events and its ending. When the client disconnects, the engine aborts the request, and the client
pays for what was produced, from the first token on. What we cut is free. If the database is lost on
the way, the hold stays open and recovery releases it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from sqlalchemy import Connection
from starlette.requests import ClientDisconnect

from billing.cache_split import CacheSplit, cache_split
from billing.entries import Renewal, activate, remove_unpaid, renew
from billing.errors import HoldNotOwned, InsufficientBalance, OwnerEnded, UnknownPrice
from billing.facts import is_failure
from billing.meters import Quantities
from billing.settlement import CutBy
from engine.client import (
    Admitted,
    Committed,
    EngineLost,
    Finished,
    FinishReason,
    GenerateRequest,
    Rejected,
    RequestStream,
    Tokens,
)
from gateway.dependencies import Dependencies
from gateway.errors import (
    EngineFailed,
    EngineReplaced,
    GatewayError,
    LedgerUnavailable,
    Overloaded,
    rejection,
)
from gateway.requests.entry_wait import EntryWait
from gateway.requests.finish import release_hold, settle_hold, withdraw
from gateway.requests.hold import HeldOrder, open_when_unblocked
from gateway.requests.ledger_writes import write
from gateway.requests.order import Order, require_model
from gateway.requests.output import BlockEvent, OutputBlocks
from gateway.requests.usage import bill_up_to, grant_facts
from gateway.wire.response import StopReason

log = logging.getLogger(__name__)

# Without an event for this long the engine is taken for hung; the SDK's own read timeout.
ENGINE_SILENCE_SECONDS = 600.0

# What a request may fail with. Anything else is a bug, and its traceback goes to the log.
EXPECTED = (
    GatewayError,
    InsufficientBalance,
    UnknownPrice,
    OwnerEnded,
    HoldNotOwned,
    EngineLost,
    ClientDisconnect,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the output ended; the request is settled by then."""

    stop_reason: StopReason
    stop_sequence: str | None
    quantities: Quantities


class Generation:
    """One open request. `run` is its task; the other methods are for the response.

    Await `admitted`, then `next_events` until it returns None, then `ended`; the first and the last
    raise what the request failed with. `hold_is_open` is whether its hold is still to be closed.
    """

    def __init__(self, order: Order, *, deps: Dependencies) -> None:
        self.order = order
        self.hold_is_open = False
        self._deps = deps
        loop = asyncio.get_running_loop()
        self._admitted: asyncio.Future[CacheSplit] = loop.create_future()
        self._ended: asyncio.Future[Ending] = loop.create_future()
        self._events: list[BlockEvent] = []  # not taken yet; bounded by max_tokens
        self._news = asyncio.Event()
        self._request_stream: RequestStream | None = None
        self._stopped_by: Exception | None = None
        self._cut_by: CutBy | None = None
        self._renewals: tuple[Renewal, ...] = ()
        self._wait = EntryWait(
            deps.wake_ups,
            boot_id=deps.boot_id,
            seconds=deps.settings.cache_wait_seconds,
        )
        self._first_token_at_ms: int | None = None
        self._output = OutputBlocks(
            order.prompt.model.tokenizer.detokenizer(),
            stop_sequences=order.body.stop_sequences or (),
            stop_token_ids=order.engine_info.stop_token_ids,
        )

    @property
    def stopped_at(self) -> int | None:
        """The output tokens up to the stop string that ended the output; None without one."""
        return None if self._output.stop_sequence is None else self._output.num_tokens

    async def admitted(self) -> CacheSplit:
        """Wait until the engine has admitted the request; from then on its cache split is final."""
        return await asyncio.shield(self._admitted)

    async def next_events(self, *, wait_seconds: float | None = None) -> list[BlockEvent] | None:
        """Wait for block events and return all there are; None when there will be no more.

        After `wait_seconds` without an event the list is empty. A timer costs less here than
        `asyncio.timeout`, and a token comes this way.
        """
        if not self._events and not self._ended.done():
            self._news.clear()
            timer = None
            if wait_seconds is not None:
                timer = asyncio.get_running_loop().call_later(wait_seconds, self._news.set)
            try:
                await self._news.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        if not self._events and self._ended.done():
            return None
        events, self._events = self._events, []
        return events

    async def ended(self) -> Ending:
        """Wait until the request is settled."""
        return await asyncio.shield(self._ended)

    def abandon(self) -> None:
        """The client has disconnected: abort; it pays from the first token on."""
        self._cut(ClientDisconnect(), by="client")

    def stop(self, cause: Exception) -> None:
        """We stop the request: abort; it is free, and fails with `cause`. A no-op at the end."""
        self._cut(cause, by="us")

    def _cut(self, cause: Exception, *, by: CutBy) -> None:
        if self._ended.done() or self._stopped_by is not None:
            return
        self._stopped_by, self._cut_by = cause, by
        self._wait.stop(cause)
        if self._request_stream is not None:
            self._request_stream.abort()

    async def run(self) -> None:
        """Run the request to its end. Raises nothing but its own cancellation, at shutdown."""
        try:
            ending = await self._generate()
        except asyncio.CancelledError:
            self._fail(Overloaded("The server has stopped"))
            raise
        except Exception as error:
            if not isinstance(error, EXPECTED):
                log.exception("generation_failed", extra={"request_id": self.order.request_id})
            self._fail(error)
        else:
            self._ended.set_result(ending)
            self._news.set()

    def _fail(self, error: Exception) -> None:
        for future in (self._admitted, self._ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: perhaps no task awaits it any more
        self._news.set()

    async def _generate(self) -> Ending:
        held = await open_when_unblocked(self.order, deps=self._deps, wait=self._wait)
        self.hold_is_open = True
        try:
            self._request_stream = request_stream = self._submit(held.request)
        except EngineLost:
            await self._release("engine_lost")
            raise
        except EngineReplaced:
            await self._release("engine_replaced")
            raise
        if self._stopped_by is not None:
            request_stream.abort()
        try:
            end = await self._follow(request_stream, held)
        except Exception:
            # No consumer is left: we cut it, and recovery will release its hold.
            request_stream.abort()
            raise
        if isinstance(end, Rejected):
            await self._release(end.code)
            raise rejection(end)
        return await self._close(end, held)

    def _submit(self, request: GenerateRequest) -> RequestStream:
        """Submit the request to the engine, which may have been replaced since the order.

        Raises EngineLost or EngineReplaced; the engine has not seen the request then.
        """
        if (info := self._deps.engine.info) is not None:
            require_model(info, self.order.prompt.model)
        return self._deps.engine.generate(request)

    async def _follow(self, request_stream: RequestStream, held: HeldOrder) -> Finished | Rejected:
        """Handle the engine's events as they arrive, and return the last one. Raises EngineLost."""
        try:
            async with asyncio.timeout(ENGINE_SILENCE_SECONDS) as silence:
                return await self._follow_within(silence, request_stream, held)
        except TimeoutError:
            seconds = f"{ENGINE_SILENCE_SECONDS:.0f} s"
            raise EngineLost(f"The engine said nothing for {seconds}") from None

    async def _follow_within(
        self, silence: asyncio.Timeout, request_stream: RequestStream, held: HeldOrder
    ) -> Finished | Rejected:
        now = asyncio.get_running_loop().time
        moved_at = -inf
        async for event in request_stream:
            # Moved now and then: a token must not pay for a timer of its own.
            if now() - moved_at > ENGINE_SILENCE_SECONDS / 10:
                moved_at = now()
                silence.reschedule(moved_at + ENGINE_SILENCE_SECONDS)
            match event:
                case Tokens(token_ids=token_ids):
                    self._take(token_ids, request_stream)
                case Admitted(grants=grants):
                    cache = cache_split(held.hold, grant_facts(grants), moment="admission")
                    self._admitted.set_result(cache)
                    await self._update_entries(held, cache)
                case Committed(num_tokens=num_tokens):
                    await self._activate(num_tokens)
                case Finished() | Rejected():
                    return event
        raise EngineLost("The engine's events ended without a last one")

    async def _update_entries(self, held: HeldOrder, cache: CacheSplit) -> None:
        """At admission renew the entries read, and remove those that the engine will not pin."""

        def update(conn: Connection) -> None:
            remove_unpaid(conn, held.hold.request_id, paid=cache.writes)
            self._renewals = renew(conn, held.read_keys, started_at_ms=self.order.started_at_ms)

        if held.read_keys or cache.refused:
            await self._change_entries(update)

    async def _activate(self, num_tokens: int) -> None:
        """Make the entry of a committed prefix live, before any output is shown."""
        request_id = self.order.request_id
        await self._change_entries(partial(activate, request_id=request_id, num_tokens=num_tokens))

    async def _change_entries(self, change: Callable[[Connection], None]) -> None:
        request_id = self.order.request_id
        try:
            await write(self._deps, change)
        except LedgerUnavailable:
            # Nothing is lost: settlement makes paid entries live and removes the others.
            log.warning("entries_not_changed_yet", extra={"request_id": request_id})
        self._deps.wake_ups.notify(request_id)

    def _take(self, token_ids: tuple[int, ...], request_stream: RequestStream) -> None:
        if self._first_token_at_ms is None:
            self._first_token_at_ms = self._deps.now_ms()
        self._show(self._output.push(token_ids))
        if self.stopped_at is not None:
            # Sent again for each token that was on its way meanwhile; a no-op in the engine then.
            request_stream.finish(self.stopped_at)

    def _show(self, events: list[BlockEvent]) -> None:
        if events:
            self._events.extend(events)
            self._news.set()

    async def _close(self, finished: Finished, held: HeldOrder) -> Ending:
        """Settle or release, and only then return how the output ended."""
        record = finished.record
        if record is None:
            await self._release(finished.reason)
            raise self._stopped_by or Overloaded("The engine dropped this request from its queue")
        self._show(self._output.flush())
        record = bill_up_to(record, self.stopped_at)
        stop_reason = self._stop_reason(record.finish_reason)
        settlement = await settle_hold(
            self._deps,
            record,
            stop_reason=stop_reason,
            first_token_at_ms=self._first_token_at_ms,
            cut_by=self._cut_by if stop_reason is None else None,
        )
        self.hold_is_open = False
        if stop_reason is not None:
            self._show(self._output.close())
            quantities = settlement.record.quantities
            return Ending(stop_reason, self._output.stop_sequence, quantities)
        if settlement.record.charged_nanos == 0:
            await withdraw(self._deps, held.hold, record, self._renewals)
        if record.finish_reason == "aborted":
            raise self._stopped_by or Overloaded("The engine stopped this request")
        log.error("engine_failed", extra={"request_id": self.order.request_id})
        raise EngineFailed("The engine failed on this request")

    async def _release(self, reason: str) -> None:
        await release_hold(self._deps, self.order.request_id, reason=reason)
        self.hold_is_open = False

    def _stop_reason(self, reason: FinishReason) -> StopReason | None:
        """Return the wire's stop reason; None if the output was cut."""
        if is_failure(reason) or reason == "aborted":
            return None
        if self._output.stop_sequence is not None:
            return "stop_sequence"
        match reason:
            case "max_tokens" if self.order.is_clamped:
                return "model_context_window_exceeded"
            case "max_tokens":
                return "max_tokens"
            case "stop_token" | "finished":
                return "end_turn"
