"""One request's life behind its connection: hold, engine, entries, and one settlement or release.

If another request is about to write what this one could read, it waits for that before its hold.

A generation runs in a task of its own that no connection can cancel. Whoever answers the client
reads its text and its ending. If nobody reads any more, the engine is told to stop, and what it
produced is settled all the same. If the engine or the database is lost on the way, the hold stays
open and recovery closes it from the engine's journal.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import ClientDisconnect

from billing.entries import activate, remove_unpaid
from billing.errors import InsufficientBalance, UnknownPrice
from billing.facts import is_failure
from billing.holds import Hold
from billing.meters import Quantities
from engine.client import (
    Admitted,
    Committed,
    EngineLost,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Grant,
    Rejected,
    Tokens,
)
from engine.client import Generation as EngineGeneration
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
from gateway.requests.finish import release_hold, settle_hold
from gateway.requests.hold import open_when_unblocked
from gateway.requests.ledger_writes import write
from gateway.requests.order import Order, require_model
from gateway.requests.output import OutputText
from gateway.requests.usage import CacheOutcome, bill_up_to, cache_outcome, granted_writes
from gateway.wire.response import StopReason

log = logging.getLogger(__name__)

# The longest the engine may say nothing before it is taken for hung; the SDK's own read timeout.
ENGINE_SILENCE_SECONDS = 600.0

# What a request may fail with. Anything else is somebody's bug, and its traceback goes to the log.
EXPECTED = (GatewayError, InsufficientBalance, UnknownPrice, EngineLost, ClientDisconnect)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended; it is settled by then."""

    stop_reason: StopReason
    stop_sequence: str | None
    quantities: Quantities


class Generation:
    """A request in flight: `run` is its task, the rest is for whoever answers the client.

    Read `admitted`, then `next_text` until it is empty, then `ended`; the first and the last raise
    what the request failed with. `hold_is_open` tells whether the ledger still waits for its end.
    """

    def __init__(self, order: Order, *, deps: Dependencies) -> None:
        self.order = order
        self.hold_is_open = False
        self._deps = deps
        loop = asyncio.get_running_loop()
        self._admitted: asyncio.Future[CacheOutcome] = loop.create_future()
        self._ended: asyncio.Future[Ending] = loop.create_future()
        self._texts: deque[str] = deque()  # not taken yet; bounded by the request's max_tokens
        self._news = asyncio.Event()
        self._engine_generation: EngineGeneration | None = None
        self._stopped_by: Exception | None = None
        self._wait = EntryWait(
            deps.wake_ups,
            boot_id=deps.boot_id,
            seconds=deps.settings.cache_wait_seconds,
        )
        self._first_token_at_ms: int | None = None
        self._output = OutputText(
            order.prompt.model.tokenizer.detokenizer(),
            stop_sequences=order.body.stop_sequences or (),
            stop_token_ids=order.engine_info.stop_token_ids,
        )

    @property
    def stopped_at(self) -> int | None:
        """The output tokens up to the stop string that ended the answer; None without one."""
        return None if self._output.stop_sequence is None else self._output.num_tokens

    async def admitted(self) -> CacheOutcome:
        """Wait until the engine has admitted the request; from then on its cache split is final."""
        return await asyncio.shield(self._admitted)

    async def next_text(self) -> str:
        """Wait for the next piece of text; empty when there will be no more."""
        while not self._texts and not self._ended.done():
            self._news.clear()
            await self._news.wait()
        return self._texts.popleft() if self._texts else ""

    async def ended(self) -> Ending:
        """Wait until the request is settled."""
        return await asyncio.shield(self._ended)

    def abandon(self) -> None:
        """The client has gone: stop the engine, settle what it produced."""
        self.stop(ClientDisconnect())

    def stop(self, cause: Exception) -> None:
        """Stop the engine, settle what it produced, and fail with `cause`; too late at the end."""
        if self._ended.done() or self._stopped_by is not None:
            return
        self._stopped_by = cause
        self._wait.stop(cause)
        if self._engine_generation is not None:
            self._engine_generation.abort()

    async def run(self) -> None:
        """Live the request's whole life. Raises nothing but its own cancellation, at shutdown."""
        try:
            ending = await self._answer()
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
                future.exception()  # seen: perhaps nobody waits for it any more
        self._news.set()

    async def _answer(self) -> Ending:
        held = await open_when_unblocked(self.order, deps=self._deps, wait=self._wait)
        self.hold_is_open = True
        try:
            self._engine_generation = engine_generation = self._submit(held.request)
        except EngineLost:
            await self._release("engine_lost")
            raise
        except EngineReplaced:
            await self._release("engine_replaced")
            raise
        if self._stopped_by is not None:
            engine_generation.abort()
        try:
            end = await self._follow(engine_generation, held.hold)
        except Exception:
            # Nobody follows it any more; recovery settles what it had produced.
            engine_generation.abort()
            raise
        if isinstance(end, Rejected):
            await self._release(end.code)
            raise rejection(end)
        return await self._close(end)

    def _submit(self, request: GenerateRequest) -> EngineGeneration:
        """Give the request to the engine, which may be another one than the order was placed for.

        Raises EngineLost or EngineReplaced; the engine has not seen the request then.
        """
        if (info := self._deps.engine.info) is not None:
            require_model(info, self.order.prompt.model)
        return self._deps.engine.generate(request)

    async def _follow(self, engine_generation: EngineGeneration, hold: Hold) -> Finished | Rejected:
        """Take the engine's events as they come, and return the last one."""
        events = aiter(engine_generation)
        while True:
            match await _next_event(events):
                case Admitted(grants=grants):
                    self._admitted.set_result(cache_outcome(hold, grants))
                    await self._withdraw_refused(hold, grants)
                case Committed(tokens=tokens):
                    await self._activate(tokens)
                case Tokens(ids=ids):
                    self._take(ids, engine_generation)
                case (Finished() | Rejected()) as last:
                    return last

    async def _withdraw_refused(self, hold: Hold, grants: tuple[Grant, ...]) -> None:
        """Take back the entries that the engine will not pin, so that nobody waits for them."""
        granted = granted_writes(hold, grants)
        if len(granted) < len(hold.writes):
            await self._change_entries(partial(remove_unpaid, paid=granted))

    async def _activate(self, tokens: int) -> None:
        """Make the entry of a committed prefix live, before any of the answer is seen."""
        await self._change_entries(partial(activate, tokens=tokens))

    async def _change_entries(self, change: Callable[..., None]) -> None:
        request_id = self.order.request_id
        try:
            await write(self._deps, partial(change, request_id=request_id))
        except LedgerUnavailable:
            # Not lost: settlement makes paid entries live and removes the others.
            log.warning("entries_not_changed_yet", extra={"request_id": request_id})
        self._deps.wake_ups.notify(request_id)

    def _take(self, ids: tuple[int, ...], engine_generation: EngineGeneration) -> None:
        if self._first_token_at_ms is None:
            self._first_token_at_ms = self._deps.now_ms()
        self._show(self._output.push(ids))
        if self.stopped_at is not None:
            # Said again for each overrun token that was on its way; it changes nothing then.
            engine_generation.finish(self.stopped_at)

    def _show(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._news.set()

    async def _close(self, finished: Finished) -> Ending:
        """Settle or release, and only then say how the answer ended."""
        record = finished.record
        if record is None:
            await self._release(finished.reason)
            raise self._stopped_by or Overloaded("The engine dropped this request from its queue")
        self._show(self._output.flush())
        record = bill_up_to(record, self.stopped_at)
        stop_reason = self._stop_reason(record.finish_reason)
        quantities = await settle_hold(
            self._deps,
            record,
            stop_reason=stop_reason,
            first_token_at_ms=self._first_token_at_ms,
        )
        self.hold_is_open = False
        if stop_reason is not None:
            return Ending(stop_reason, self._output.stop_sequence, quantities)
        if record.finish_reason == "aborted":
            raise self._stopped_by or Overloaded("The engine stopped this request")
        log.error("engine_failed", extra={"request_id": self.order.request_id})
        raise EngineFailed("The engine failed on this request")

    async def _release(self, reason: str) -> None:
        await release_hold(self._deps, self.order.request_id, reason=reason)
        self.hold_is_open = False

    def _stop_reason(self, reason: FinishReason) -> StopReason | None:
        """What the client is told; None if the answer did not come to an end of its own."""
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


async def _next_event(events: AsyncIterator[Event]) -> Event:
    try:
        async with asyncio.timeout(ENGINE_SILENCE_SECONDS):
            return await anext(events)
    except StopAsyncIteration:
        raise EngineLost("The engine's events ended without a last one") from None
    except TimeoutError:
        raise EngineLost(f"The engine said nothing for {ENGINE_SILENCE_SECONDS:.0f} s") from None
