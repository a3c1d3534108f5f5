"""Transaction 1 (hold): look up cache entries, hold the worst case, insert pending entries.

A request that could read what another one is writing waits first (`entry_wait.py`).
"""

from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from billing.entries import PendingEntry, find_live, find_pending
from billing.holds import Hold, open_hold
from billing.meters import TtlClass
from billing.owners import require_running
from billing.price_cards import card_in_force
from billing.rating import worst_case_nanos
from engine.client import Breakpoint, GenerateRequest, Sampling
from gateway.dependencies import Dependencies
from gateway.errors import TooManyWaiting
from gateway.requests.entry_wait import EntryWait
from gateway.requests.ledger_writes import write
from gateway.requests.lookup import CacheMatch, entries_to_wait_for, keys_to_look_up, match_entries
from gateway.requests.namespace import namespace
from gateway.requests.order import Order
from gateway.wire.request import MessagesRequest

TTL_CLASSES: tuple[TtlClass, ...] = ("5m", "1h")

# Past this no request waits for a pending entry: its writer is stuck, or dead and not recovered.
# A writer spends at most a minute in the engine's queue, and computes its prefix after that.
AWAITED_MS_MAX = 90_000


@dataclass(frozen=True, slots=True)
class HeldOrder:
    """What transaction 1 found: the hold, the keys of the entries read, the engine's request."""

    hold: Hold
    read_keys: tuple[str, ...]
    request: GenerateRequest


async def open_when_unblocked(order: Order, *, deps: Dependencies, wait: EntryWait) -> HeldOrder:
    """Run transaction 1, after waiting for entries that other requests are writing.

    Of several requests that waited for a write that failed, the first one to come back writes, and
    the others find its entry pending.

    Raises the cause that the wait was stopped with, TooManyWaiting, LedgerUnavailable,
    InsufficientBalance or UnknownPrice; nothing is left behind then.
    """
    waits = deps.metrics.cache_waits
    awaited_tokens = 0
    while True:
        found = await write(
            deps, partial(hold_order, order=order, deps=deps, may_wait=wait.is_allowed)
        )
        if isinstance(found, HeldOrder):
            break
        awaited_tokens = found[0].num_tokens
        try:
            with deps.metrics.cache_waiting.track_inprogress():
                await wait.until_changed(found)
        except Exception as error:
            waits.labels("refused" if isinstance(error, TooManyWaiting) else "stopped").inc()
            raise
    if awaited_tokens:
        is_read = found.hold.read_tokens >= awaited_tokens
        without = "vanished" if wait.is_allowed else "timed_out"
        waits.labels("read" if is_read else without).inc()
    return found


def hold_order(
    conn: Connection, order: Order, *, deps: Dependencies, may_wait: bool
) -> HeldOrder | list[PendingEntry]:
    """Transaction 1: find what is read, hold the worst case, leave pending entries.

    With `may_wait`, and if another request is about to write a prefix that this one could read, it
    writes nothing and returns the pending entries of that prefix. They were pending before this
    moment, and a waiting request has none of its own, so no two requests wait for each other.

    Raises InsufficientBalance, UnknownPrice or OwnerEnded, and then leaves nothing.
    """
    require_running(conn, deps.boot_id)
    points = order.prompt.breakpoints
    keys = keys_to_look_up(order.entry_keys, points)
    live = find_live(conn, keys, now_ms=order.started_at_ms)
    now_ms = deps.now_ms()
    if may_wait and keys and keys[-1] not in live:
        pending = find_pending(conn, keys, started_at_ms=order.started_at_ms, now_ms=now_ms)
        if awaited := entries_to_wait_for(order.entry_keys, points, live=live, pending=pending):
            return awaited
    match = match_entries(order.entry_keys, points, live)
    hold = _hold(conn, order, match, deps=deps)
    open_hold(
        conn,
        hold,
        ttl_ms={name: deps.settings.ttl_ms(name) for name in TTL_CLASSES},
        awaited_until_ms=now_ms + AWAITED_MS_MAX,
    )
    reads = tuple(entry.key for entry in match.read_entries)
    return HeldOrder(hold, reads, _generate_request(order, match, deps=deps))


def _hold(conn: Connection, order: Order, match: CacheMatch, *, deps: Dependencies) -> Hold:
    model_id = order.prompt.model.id
    points = order.prompt.breakpoints
    card = card_in_force(conn, model_id, order.started_at_ms)
    amount_nanos = worst_case_nanos(
        card,
        total_tokens=order.prompt.rendered.num_tokens,
        marked_tokens=points[-1].num_tokens if points else 0,
        any_1h=any(point.ttl_class == "1h" for point in points),
        max_tokens=order.max_tokens,
    )
    return Hold(
        request_id=order.request_id,
        organization_id=order.caller.organization_id,
        workspace_id=order.workspace_id,
        key_id=order.caller.key_id,
        model_id=model_id,
        requested_model=order.body.model,
        price_card_id=card.id,
        total_tokens=order.prompt.rendered.num_tokens,
        read_tokens=match.read_tokens,
        max_tokens=order.max_tokens,
        writes=match.writes,
        stream=bool(order.body.stream),
        amount_nanos=amount_nanos,
        owner_boot_id=deps.boot_id,
        engine_id=order.engine_info.engine_id,
        started_at_ms=order.started_at_ms,
    )


def _generate_request(order: Order, match: CacheMatch, *, deps: Dependencies) -> GenerateRequest:
    model = order.prompt.model
    reads = [
        Breakpoint(entry.num_tokens, entry.ttl_ms, write=False, persist=entry.ttl_class == "1h")
        for entry in match.read_entries
    ]
    writes = [
        Breakpoint(
            write.num_tokens,
            deps.settings.ttl_ms(write.ttl_class),
            write=True,
            persist=write.ttl_class == "1h",
        )
        for write in match.writes
    ]
    return GenerateRequest(
        request_id=order.request_id,
        namespace=namespace(
            deps.secret,
            organization_id=order.caller.organization_id,
            workspace_id=order.workspace_id,
            model_id=model.id,
            weights_digest=model.weights_digest,
        ),
        prompt_token_ids=order.prompt.rendered.token_ids,
        max_tokens=order.max_tokens,
        read_tokens=match.read_tokens,
        sampling=_sampling(order.body, order.engine_info.default_sampling),
        stop_token_ids=order.engine_info.stop_token_ids,
        # Every read lies at or below A and every write above it, so this ascends strictly.
        breakpoints=(*reads, *writes),
        ignore_eos=order.ignore_eos,
    )


def _sampling(body: MessagesRequest, default: Sampling) -> Sampling:
    """The sampling fields of the body; where one is missing, the model's default."""
    return Sampling(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=default.top_k if body.top_k is None else body.top_k,
        seed=default.seed,
    )
