"""The double-entry ledger: post transfers between accounts, read balances.

A transfer debits one account and credits another, so the books balance by construction. Account
totals only grow. They are a cache of the transfers, and `verify` compares the two.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, bindparam, insert, select, text, update

from billing import accounts as names
from billing.booking import stamp
from billing.errors import NotPrepaid, TransferConflict, UnknownOrganization
from billing.rating import PricedLine
from billing.tables import accounts, organizations, transfers

TransferKind = Literal["usage", "overdraft", "top_up", "repayment"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """An amount that moves from the debit account to the credit account.

    A `usage` transfer also carries its priced line, the card that priced it, and its request.
    """

    kind: TransferKind
    debit_account_id: str
    credit_account_id: str
    amount_nanos: int
    line: PricedLine | None = None
    price_card_id: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Balance:
    """The totals of an account."""

    account_id: str
    debits_nanos: int
    credits_nanos: int
    pending_nanos: int  # debits that open holds reserve

    @property
    def credit_nanos(self) -> int:
        """The balance of a credit account: a customer's prepaid money."""
        return self.credits_nanos - self.debits_nanos

    @property
    def debit_nanos(self) -> int:
        """The balance of a debit account: a customer's debt."""
        return self.debits_nanos - self.credits_nanos

    @property
    def available_nanos(self) -> int:
        """The credit balance that open holds do not reserve."""
        return self.credit_nanos - self.pending_nanos


@dataclass(frozen=True, slots=True)
class TopUp:
    """A top-up that is in the books; `repeated` if it was there before this call."""

    balance: Balance
    repeated: bool


def transaction_id(request_id: str) -> str:
    """Return the id of the transaction that settles a request."""
    return "txn_" + request_id.removeprefix("req_")


def post(
    conn: Connection,
    tx_id: str,
    moved: Sequence[Transfer],
    *,
    effective_at_ms: int,
    booked_at_ms: int,
    first_seq: int = 1,
) -> None:
    """Write the transfers of one transaction and add them to their accounts' totals.

    `effective_at_ms` is when it happened, `booked_at_ms` is from `booking.stamp`.
    """
    if not moved:
        return
    conn.execute(
        insert(transfers),
        [
            {
                "tx_id": tx_id,
                "seq": seq,
                "kind": transfer.kind,
                "debit_account_id": transfer.debit_account_id,
                "credit_account_id": transfer.credit_account_id,
                "amount_nanos": transfer.amount_nanos,
                "meter": transfer.line.meter.value if transfer.line else None,
                "quantity": transfer.line.quantity if transfer.line else None,
                "rate_pico": transfer.line.rate_pico if transfer.line else None,
                "price_card_id": transfer.price_card_id,
                "request_id": transfer.request_id,
                "effective_at_ms": effective_at_ms,
                "booked_at_ms": booked_at_ms,
            }
            for seq, transfer in enumerate(moved, start=first_seq)
        ],
    )
    _add_to_totals(conn, moved)


def balance(conn: Connection, account_id: str) -> Balance:
    """Return the totals of an account, which must exist."""
    return balance_of(conn.execute(select(accounts).where(accounts.c.id == account_id)).one())


def trial_balance(conn: Connection) -> list[Balance]:
    """Return every account's totals, by id. All debits together equal all credits."""
    return [balance_of(row) for row in conn.execute(select(accounts).order_by(accounts.c.id))]


def balance_of(row: Row[Any]) -> Balance:
    """Return the totals in an accounts row."""
    return Balance(
        account_id=row.id,
        debits_nanos=row.debits_posted_nanos,
        credits_nanos=row.credits_posted_nanos,
        pending_nanos=row.debits_pending_nanos,
    )


def open_accounts(
    conn: Connection, account_ids: Iterable[str], organization_id: str | None
) -> None:
    """Create the accounts that do not exist yet; without an organisation they are ours."""
    conn.execute(
        text(
            "INSERT INTO accounts (id, organization_id, debits_posted_nanos,"
            " credits_posted_nanos, debits_pending_nanos)"
            " VALUES (:id, :organization_id, 0, 0, 0) ON CONFLICT DO NOTHING"
        ),
        [{"id": account_id, "organization_id": organization_id} for account_id in account_ids],
    )


def top_up(
    conn: Connection, *, organization_id: str, amount_nanos: int, transfer_id: str, now_ms: int
) -> TopUp:
    """Add money that a prepaid customer paid, and repay a debt from it first.

    The caller makes `transfer_id`. A second call with the same id and values adds nothing. Raises
    UnknownOrganization, NotPrepaid, or TransferConflict if the id was used with other values.
    """
    account_id = names.prepaid(organization_id)
    before = select(transfers).where(transfers.c.tx_id == transfer_id, transfers.c.seq == 1)
    if first := conn.execute(before).one_or_none():
        if (first.kind, first.credit_account_id, first.amount_nanos) != (
            "top_up", account_id, amount_nanos,
        ):  # fmt: skip
            raise TransferConflict(transfer_id)
        return TopUp(balance(conn, account_id), repeated=True)
    known = select(organizations.c.mode).where(organizations.c.id == organization_id)
    mode = conn.scalar(known)
    if mode is None:
        raise UnknownOrganization(organization_id)
    if mode != "prepaid":
        raise NotPrepaid(organization_id)
    booked_at_ms = stamp(conn, not_before_ms=now_ms)
    paid = Transfer("top_up", names.OPERATOR_FUNDING, account_id, amount_nanos)
    post(conn, transfer_id, [paid], effective_at_ms=now_ms, booked_at_ms=booked_at_ms)
    debt_nanos = balance(conn, names.overdraft(organization_id)).debit_nanos
    if debt_nanos > 0:
        repaid = Transfer(
            "repayment",
            account_id,
            names.overdraft(organization_id),
            min(debt_nanos, balance(conn, account_id).credit_nanos),
        )
        post(
            conn,
            transfer_id,
            [repaid],
            effective_at_ms=now_ms,
            booked_at_ms=booked_at_ms,
            first_seq=2,
        )
    return TopUp(balance(conn, account_id), repeated=False)


def _add_to_totals(conn: Connection, moved: Sequence[Transfer]) -> None:
    debits: defaultdict[str, int] = defaultdict(int)
    credits_: defaultdict[str, int] = defaultdict(int)
    for transfer in moved:
        debits[transfer.debit_account_id] += transfer.amount_nanos
        credits_[transfer.credit_account_id] += transfer.amount_nanos
    conn.execute(
        update(accounts)
        .where(accounts.c.id == bindparam("account_id"))
        .values(
            debits_posted_nanos=accounts.c.debits_posted_nanos + bindparam("debits"),
            credits_posted_nanos=accounts.c.credits_posted_nanos + bindparam("credits"),
        ),
        [
            {"account_id": id_, "debits": debits[id_], "credits": credits_[id_]}
            for id_ in sorted({*debits, *credits_})
        ],
    )
