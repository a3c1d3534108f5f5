"""Orders: a sound request within the engine's limits, and transaction 1, which takes its hold."""

from dataclasses import dataclass

from sqlalchemy import Connection

from billing.customers import Caller
from billing.entries import PendingEntry, find_live, find_pending
from billing.holds import Hold, open_hold
from billing.meters import TtlClass
from billing.price_cards import card_in_force
from billing.rating import worst_case_nanos
from engine.client import Breakpoint, EngineInfo, GenerateRequest, Sampling
from gateway.dependencies import Dependencies
from gateway.errors import EngineReplaced, InvalidRequest
from gateway.prompts.model_catalog import ServedModel
from gateway.prompts.parse import ParsedPrompt
from gateway.prompts.prefix_hash import entry_keys, scope
from gateway.requests.lookup import CacheMatch, entries_to_wait_for, keys_to_look_up, match_entries
from gateway.requests.namespace import namespace
from gateway.wire.request import MessagesRequest

TTL_CLASSES: tuple[TtlClass, ...] = ("5m", "1h")

# Past this a pending entry is nobody's to wait for: its writer is stuck, or dead and not recovered.
# A writer spends at most a minute in the engine's queue, and computes its prefix after that.
AWAITED_MS_MAX = 90_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request that can be held for: read, rendered, and within the engine's limits.

    entry_keys      one for each block of the prompt
    max_tokens      the output budget: what the client asked, clamped to what the window leaves
    ignore_eos      whether the output goes on to its budget whatever the model wants
    started_at_ms   taken once, when the body has arrived: every entry's lifetime runs from it
    """

    request_id: str
    message_id: str
    caller: Caller
    workspace_id: str
    body: MessagesRequest
    prompt: ParsedPrompt
    entry_keys: tuple[str, ...]
    engine_info: EngineInfo
    max_tokens: int
    ignore_eos: bool
    started_at_ms: int

    @property
    def is_clamped(self) -> bool:
        """Whether the window, not the client, bounds the output."""
        return self.max_tokens < self.body.max_tokens


@dataclass(frozen=True, slots=True)
class HeldOrder:
    """What transaction 1 left in the ledger, and what the engine is asked to do for it."""

    hold: Hold
    request: GenerateRequest


def place_order(
    body: MessagesRequest,
    prompt: ParsedPrompt,
    *,
    caller: Caller,
    engine_info: EngineInfo,
    request_id: str,
    message_id: str,
    ignore_eos: bool,
    started_at_ms: int,
) -> Order:
    """Check the request against the engine's limits. Raises InvalidRequest or EngineReplaced."""
    assert caller.workspace_id is not None, "only a customer key orders, and it has a workspace"
    require_model(engine_info, prompt.model)
    if body.max_tokens == 0 and body.stream:
        raise InvalidRequest("must be false when max_tokens is 0", path="stream")
    model = prompt.model
    num_tokens = prompt.rendered.num_tokens
    window_tokens = min(model.context_window_tokens, engine_info.max_request_tokens)
    if num_tokens > window_tokens:
        raise InvalidRequest(f"prompt is too long: {num_tokens} tokens > {window_tokens} maximum")
    cache_scope = scope(
        workspace_id=caller.workspace_id, model_id=model.id, weights_digest=model.weights_digest
    )
    return Order(
        request_id=request_id,
        message_id=message_id,
        caller=caller,
        workspace_id=caller.workspace_id,
        body=body,
        prompt=prompt,
        entry_keys=entry_keys(cache_scope, prompt.rendered),
        engine_info=engine_info,
        max_tokens=min(body.max_tokens, window_tokens - num_tokens),
        ignore_eos=ignore_eos,
        started_at_ms=started_at_ms,
    )


def require_model(engine_info: EngineInfo, model: ServedModel) -> None:
    """Sell no other model's work under this one's name and price. Raises EngineReplaced."""
    if not model.is_run_by(engine_info):
        raise EngineReplaced("The engine was started with another model; try again later")


def hold_order(
    conn: Connection, order: Order, *, deps: Dependencies, may_wait: bool
) -> HeldOrder | list[PendingEntry]:
    """Transaction 1: find what is read, hold the worst case, leave pending entries, refresh.

    With `may_wait` it may find that others are about to write what the request could read: then it
    writes nothing and returns those entries, of one prefix. They became pending before this moment,
    and whoever waits for them has nothing pending, so no two requests ever wait for each other.

    Raises InsufficientBalance or UnknownPrice, and then leaves nothing.
    """
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
        refreshed_entry_keys=[entry.key for entry in match.read_entries],
        awaited_until_ms=now_ms + AWAITED_MS_MAX,
    )
    return HeldOrder(hold, _generate_request(order, match, deps=deps))


def _hold(conn: Connection, order: Order, match: CacheMatch, *, deps: Dependencies) -> Hold:
    model_id = order.prompt.model.id
    points = order.prompt.breakpoints
    card = card_in_force(conn, model_id, order.started_at_ms)
    amount_nanos = worst_case_nanos(
        card,
        total_tokens=order.prompt.rendered.num_tokens,
        marked_tokens=points[-1].tokens if points else 0,
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
        started_at_ms=order.started_at_ms,
    )


def _generate_request(order: Order, match: CacheMatch, *, deps: Dependencies) -> GenerateRequest:
    model = order.prompt.model
    reads = [
        Breakpoint(entry.tokens, entry.ttl_ms, write=False, persist=entry.ttl_class == "1h")
        for entry in match.read_entries
    ]
    writes = [
        Breakpoint(
            write.tokens,
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
        prompt=order.prompt.rendered.tokens,
        max_tokens=order.max_tokens,
        read_tokens=match.read_tokens,
        sampling=_sampling(order.body, order.engine_info.default_sampling),
        stop_token_ids=order.engine_info.stop_token_ids,
        # Every read lies at or below A and every write above it, so this ascends strictly.
        breakpoints=(*reads, *writes),
        ignore_eos=order.ignore_eos,
    )


def _sampling(body: MessagesRequest, default: Sampling) -> Sampling:
    """The request's own fields; where it has none, the model's."""
    return Sampling(
        temperature=default.temperature if body.temperature is None else body.temperature,
        top_p=default.top_p if body.top_p is None else body.top_p,
        top_k=default.top_k if body.top_k is None else body.top_k,
        seed=default.seed,
    )
