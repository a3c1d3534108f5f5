"""Settlement: transaction 2 of a request charges its true cost, exactly once."""

from dataclasses import dataclass, field, replace
from typing import Literal

from sqlalchemy import Connection

from billing import accounts as names
from billing import entries
from billing.booking import stamp
from billing.cache_split import cache_split, refused_writes
from billing.errors import HoldNotFound, HoldNotOwned, InconsistentFacts
from billing.facts import EngineFacts, counter_out_of_range, is_failure
from billing.holds import Hold, HoldState, close_hold, find_hold
from billing.ledger import Transfer, balance, post, transaction_id
from billing.meters import Quantities, WritePoint
from billing.outbox import enqueue_usage, usage_payload
from billing.price_cards import card_by_id
from billing.rating import PricedLine, rate
from billing.records import (
    RequestRecord,
    Status,
    in_progress,
    request_record,
    write_engine_facts,
    write_request,
)

# Which side ended the output before its end.
CutBy = Literal["client", "us"]


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request pays for: tokens by meter, and the cache writes among them."""

    quantities: Quantities
    writes: tuple[WritePoint, ...]


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a request ended. A second call returns an equal one with `repeated` set."""

    record: RequestRecord
    repeated: bool = field(default=False, compare=False)


def charge_due(hold: Hold, facts: EngineFacts, *, cut_by: CutBy | None = None) -> Charge | None:
    """Return the charge for an admitted request, or None if it owes nothing.

    We cut, it is free; you cut, you pay from the first token on. Pure: reads only the hold, the
    engine record, and which side cut the output, if one did. The input side is the cache split at
    settlement.

    | the output                      | output tokens | charge              |
    |---------------------------------|---------------|---------------------|
    | came to its end                 | any           | input side + output |
    | was cut by the client           | some          | input side + output |
    | was cut by the client           | none          | nothing             |
    | was cut by us                   | any           | nothing             |

    We cut when the engine fails or is lost, when a gateway stops, is lost or cannot settle, and
    when the engine aborts a request that its client did not.
    """
    if cut_by == "us" or is_failure(facts.finish_reason):
        return None
    if facts.finish_reason == "aborted" and (cut_by is None or facts.output_tokens == 0):
        return None
    cache = cache_split(hold, facts.grants, moment="settlement")
    return Charge(replace(cache.quantities, output=facts.output_tokens), cache.writes)


def settle(
    conn: Connection,
    *,
    request_id: str,
    owner_boot_id: str,
    facts: EngineFacts,
    ended_at_ms: int,
    stop_reason: str | None,
    error_type: str | None = None,
    first_token_at_ms: int | None = None,
    cut_by: CutBy | None = None,
) -> Settlement:
    """Charge what a request owes, in full even above the balance, and release the rest.

    Settling or releasing a closed hold changes nothing and returns the first result.

    Raises HoldNotFound; HoldNotOwned if another gateway has taken the hold over; InconsistentFacts
    if the engine record contradicts the hold: it is not billed from, `release` closes the hold.
    """
    hold = _find(conn, request_id, owner_boot_id=owner_boot_id)
    if hold.state != "open":
        return _first_result(conn, request_id)
    _require_consistent(hold, facts)
    status = _status(facts, cut_by=cut_by)
    ending = replace(
        in_progress(hold),
        status=status,
        stop_reason=stop_reason,
        error_type=error_type if status == "failed" else None,
        first_token_at_ms=first_token_at_ms,
        ended_at_ms=ended_at_ms,
        refused=refused_writes(hold, facts.grants),
        engine=facts,
    )
    return _close(conn, ending, charge_due(hold, facts, cut_by=cut_by))


def release(
    conn: Connection, *, request_id: str, owner_boot_id: str, reason: str, ended_at_ms: int
) -> Settlement:
    """Close the hold of a request without an engine record: no charge, and no entry stays.

    Idempotent like `settle`. Raises HoldNotFound or HoldNotOwned.
    """
    ending = replace(
        in_progress(_find(conn, request_id, owner_boot_id=owner_boot_id, without_writes=True)),
        status="released",
        release_reason=reason,
        ended_at_ms=ended_at_ms,
    )
    return _close(conn, ending, None)


def _close(conn: Connection, ending: RequestRecord, due: Charge | None) -> Settlement:
    """Write the end of a request: its record, transfers, outbox row and entries, only once."""
    request_id = ending.request_id
    ending, ended_at_ms = _ended(ending)
    booked_at_ms = stamp(conn, not_before_ms=ended_at_ms)
    state: HoldState = "settled" if due is not None else "released"
    account_id = close_hold(conn, request_id, state, closed_at_ms=booked_at_ms)
    if account_id is None:
        return _first_result(conn, request_id)
    record = _priced(conn, ending, due)
    write_request(conn, record)
    if record.engine is not None:
        write_engine_facts(conn, request_id, record.engine)
    if record.postings:
        _post(conn, record, account_id, booked_at_ms=booked_at_ms)
        _enqueue(conn, record, account_id, ended_at_ms=ended_at_ms, created_at_ms=booked_at_ms)
    for write in record.writes:  # live already, unless the gateway died before the commit event
        entries.activate(conn, request_id=request_id, num_tokens=write.num_tokens)
    entries.remove_unpaid(conn, request_id, paid=record.writes)
    return Settlement(record)


def _ended(ending: RequestRecord) -> tuple[RequestRecord, int]:
    """Return the record with an end that is not before its start, and that end.

    The end can be by the clock of another gateway than the one that took the start.
    """
    assert ending.ended_at_ms is not None, "a request is closed at its end"
    ended_at_ms = max(ending.started_at_ms, ending.ended_at_ms)
    return replace(ending, ended_at_ms=ended_at_ms), ended_at_ms


def _first_result(conn: Connection, request_id: str) -> Settlement:
    record = request_record(conn, request_id)
    assert record is not None, f"closed hold without a request: {request_id}"
    return Settlement(record, repeated=True)


def _priced(conn: Connection, ending: RequestRecord, due: Charge | None) -> RequestRecord:
    if due is None:
        return ending
    lines = rate(due.quantities, card_by_id(conn, ending.price_card_id))
    return replace(
        ending,
        quantities=due.quantities,
        writes=due.writes,
        postings=tuple(lines),
        charged_nanos=sum(line.amount_nanos for line in lines),
    )


def _post(conn: Connection, record: RequestRecord, account_id: str, *, booked_at_ms: int) -> None:
    """Post one whole row a meter, and one overdraft transfer for what a prepaid balance lacks."""
    moved = [_usage(record, account_id, line) for line in record.postings]
    if account_id == names.prepaid(record.organization_id):
        lacking_nanos = record.charged_nanos - balance(conn, account_id).credit_nanos
        if lacking_nanos > 0:
            debt = names.overdraft(record.organization_id)
            moved.append(
                Transfer("overdraft", debt, account_id, lacking_nanos, request_id=record.request_id)
            )
    tx_id = transaction_id(record.request_id)
    assert record.ended_at_ms is not None, "a request is posted at its end"
    post(conn, tx_id, moved, effective_at_ms=record.ended_at_ms, booked_at_ms=booked_at_ms)


def _usage(record: RequestRecord, account_id: str, line: PricedLine) -> Transfer:
    return Transfer(
        "usage",
        debit_account_id=account_id,
        credit_account_id=names.revenue(line.meter),
        amount_nanos=line.amount_nanos,
        line=line,
        price_card_id=record.price_card_id,
        request_id=record.request_id,
    )


def _enqueue(
    conn: Connection,
    record: RequestRecord,
    account_id: str,
    *,
    ended_at_ms: int,
    created_at_ms: int,
) -> None:
    payload = usage_payload(
        organization_id=record.organization_id,
        account_id=account_id,
        request_id=record.request_id,
        ended_at_ms=ended_at_ms,
        amounts_nanos={line.meter: line.amount_nanos for line in record.postings},
    )
    enqueue_usage(conn, payload, created_at_ms=created_at_ms)


def _find(
    conn: Connection, request_id: str, *, owner_boot_id: str, without_writes: bool = False
) -> Hold:
    hold = find_hold(conn, request_id, without_writes=without_writes)
    if hold is None:
        raise HoldNotFound(request_id)
    if hold.owner_boot_id != owner_boot_id:
        raise HoldNotOwned(request_id, owner_boot_id=hold.owner_boot_id)
    return hold


def _status(facts: EngineFacts, *, cut_by: CutBy | None) -> Status:
    if cut_by == "us" or is_failure(facts.finish_reason):
        return "failed"
    if facts.finish_reason == "aborted":
        return "failed" if cut_by is None else "aborted"
    return "completed"


def _require_consistent(hold: Hold, facts: EngineFacts) -> None:
    """Raise InconsistentFacts if the engine record contradicts the hold or itself."""
    checks = (
        ("prompt", hold.total_tokens, facts.prompt_tokens),
        ("read", hold.read_tokens, facts.read_tokens),
        ("sum of the four facts", facts.prompt_tokens, facts.prompt_accounted),
    )
    if (counter := counter_out_of_range(facts)) is not None:
        raise InconsistentFacts(hold.request_id, counter)
    for what, expected, found in checks:
        if found != expected:
            raise InconsistentFacts(hold.request_id, f"{what} is {found}, not {expected}")
    if facts.output_tokens > hold.max_tokens:
        what = f"output is {facts.output_tokens}, at most {hold.max_tokens} was asked for"
        raise InconsistentFacts(hold.request_id, what)
