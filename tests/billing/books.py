"""What the billing tests are made of: a price card, a customer, a request, its engine facts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sqlalchemy import Connection, select

from billing import accounts
from billing.customers import Mode, create_key, create_organization, default_workspace_id
from billing.database import Database
from billing.entries import renew
from billing.facts import EngineFacts, GrantFact
from billing.holds import Hold, open_hold
from billing.ledger import balance
from billing.meters import Meter, WritePoint
from billing.price_cards import PriceCard, publish
from billing.rating import worst_case_nanos
from billing.settlement import CutBy, Settlement, settle
from billing.tables import transfers
from billing.verification import verify

NOW_MS = 1_780_000_000_000
OWNER = "boot_1"


def no_clock() -> int:
    """A booking clock that stands at 0: what is booked is stamped with when it happened."""
    return 0


TTL_MS = {"5m": 300_000, "1h": 3_600_000}

# Card T3 of docs/cases/billing.md: in 3,000, r 300, w5 3,750, w1h 6,000, out 15,000 nano-dollars.
T3 = PriceCard(
    id="word-model@1",
    model_id="word-model",
    version=1,
    effective_from_ms=0,
    rates={
        Meter.INPUT: 3_000_000,
        Meter.CACHE_READ: 300_000,
        Meter.CACHE_WRITE_5M: 3_750_000,
        Meter.CACHE_WRITE_1H: 6_000_000,
        Meter.OUTPUT: 15_000_000,
    },
)


@dataclass
class Books:
    """A database with card T3 and one organisation; requests are numbered."""

    database: Database
    organization_id: str

    def __post_init__(self) -> None:
        self._numbers = count(1)

    def hold(self, **changes: Any) -> Hold:
        """A hold that is not opened yet, for a plain prompt of ten words."""
        hold = Hold(
            request_id=f"req_{next(self._numbers)}",
            organization_id=self.organization_id,
            workspace_id=default_workspace_id(self.organization_id),
            key_id=f"key_{self.organization_id}",
            model_id=T3.model_id,
            requested_model=T3.model_id,
            price_card_id=T3.id,
            total_tokens=10,
            read_tokens=0,
            max_tokens=100,
            writes=(),
            stream=False,
            amount_nanos=1_000_000,
            owner_boot_id=OWNER,
            engine_id="engine_1",
            started_at_ms=NOW_MS,
        )
        return replace(hold, **changes)

    def open(
        self,
        renewed: Sequence[str] = (),
        *,
        awaited_until_ms: int | None = None,
        **changes: Any,
    ) -> Hold:
        """Open such a hold."""
        hold = self.hold(**changes)
        self.database.write_now(
            lambda conn: open_hold(
                conn,
                hold,
                ttl_ms=TTL_MS,
                awaited_until_ms=awaited_until_ms,
            )
        )
        self.database.write_now(lambda conn: renew(conn, renewed, started_at_ms=hold.started_at_ms))
        return hold

    def settle(self, hold: Hold, *, cut_by: CutBy | None = None, **changes: Any) -> Settlement:
        """Settle a hold as if everything it asked for was granted."""
        facts = engine_facts(hold, **changes)
        return self.database.write_now(
            lambda conn: settle(
                conn,
                request_id=hold.request_id,
                owner_boot_id=hold.owner_boot_id,
                facts=facts,
                ended_at_ms=NOW_MS + 1_000,
                stop_reason="end_turn",
                cut_by=cut_by,
            )
        )

    def request(
        self, *, read: int = 0, w1h: int = 0, w5: int = 0, u: int = 0, o: int = 0
    ) -> dict[str, int]:
        """A whole request of the fault reports' notation; answers its postings."""
        writes: list[WritePoint] = []
        if w1h:
            writes.append(WritePoint(read + w1h, "1h", "key-1h"))
        if w5:
            writes.append(WritePoint(read + w1h + w5, "5m", "key-5m"))
        total = read + w1h + w5 + u
        worst = worst_case_nanos(
            T3, total_tokens=total, marked_tokens=total - u, any_1h=w1h > 0, max_tokens=o
        )
        hold = self.open(
            total_tokens=total,
            read_tokens=read,
            max_tokens=o,
            writes=tuple(writes),
            amount_nanos=worst,
        )
        self.settle(hold, output_tokens=o)
        return self.postings(hold.request_id)

    def postings(self, request_id: str) -> dict[str, int]:
        """The metered rows of a request, read back from the ledger: meter to nano-dollars."""
        query = select(transfers.c.meter, transfers.c.amount_nanos).where(
            transfers.c.request_id == request_id, transfers.c.kind == "usage"
        )
        return self.database.read_now(lambda conn: dict(conn.execute(query).all()))

    def prepaid_nanos(self) -> int:
        return self._balance(accounts.prepaid(self.organization_id)).credit_nanos

    def held_nanos(self) -> int:
        return self._balance(accounts.prepaid(self.organization_id)).pending_nanos

    def debt_nanos(self) -> int:
        return self._balance(accounts.overdraft(self.organization_id)).debit_nanos

    def _balance(self, account_id: str) -> Any:
        return self.database.read_now(lambda conn: balance(conn, account_id))

    def assert_sound(self) -> None:
        report = self.database.read_now(verify)
        assert report.problems == ()


def engine_facts(hold: Hold, **changes: Any) -> EngineFacts:
    """An engine record that grants and commits every write of the hold and reuses its read."""
    promised = min(hold.read_tokens, hold.total_tokens - 1)
    facts = EngineFacts(
        engine_boot_id="engine_1",
        finish_reason="stop_token",
        prompt_tokens=hold.total_tokens,
        tokens_reused_promised=promised,
        tokens_reused_gift=0,
        tokens_read_recomputed=hold.read_tokens - promised,
        tokens_computed=hold.total_tokens - hold.read_tokens,
        grants=tuple(
            GrantFact(write.num_tokens, True, "granted", committed=True) for write in hold.writes
        ),
        output_tokens=5,
    )
    return replace(facts, **changes)


def make_books(database: Database, mode: Mode = "postpaid", name: str = "org_a") -> Books:
    """Books with one organisation, one key, and card T3 in force."""

    def write(conn: Connection) -> None:
        publish(conn, [T3], now_ms=0)
        create_organization(conn, id=name, name=name, mode=mode, now_ms=NOW_MS)
        create_key(
            conn,
            id=f"key_{name}",
            secret=f"secret of {name}",
            organization_id=name,
            name="test",
            kind="customer",
            now_ms=NOW_MS,
        )

    database.write_now(write)
    return Books(database, name)
