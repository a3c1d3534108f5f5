"""Billing's errors, as one tree; HTTP statuses are the gateway's.

BillingError
├── InsufficientBalance     the worst case of a request is above the prepaid balance
├── UnknownOrganization     no organisation has this id
├── NotPrepaid              a postpaid organisation has no balance to top up
├── UnknownWorkspace        the organisation has no such workspace
├── UnknownKey              no API key has this id
├── UnknownPrice            no price card of the model is in force
├── PriceCardFileError      the price card file cannot be used
├── PriceCardChanged        a published card was edited instead of followed by a new version
├── HoldNotFound            no hold was opened under this request id
├── HoldNotOpen             the hold is settled or released
├── HoldInUse               the hold's gateway runs, and will close it
├── RowUnreadable           a stored value is not what its column holds
├── HoldNotOwned            another gateway has taken the hold over
├── OtherEngine             a running gateway of this database uses another engine
├── OwnerEnded              this gateway was taken for dead
├── TransferConflict        a transfer id was used before for something else
├── InconsistentFacts       the engine's numbers contradict the hold or each other
├── DatabaseUrlError        the database URL is not one that kvmeter can use
├── DatabaseUnreachable     the database cannot be reached, or the file is not one
├── DatabaseNotMigrated     the schema is missing or older than the code
├── SchemaDamaged           triggers or constraints that protect the ledger are missing or changed
└── WriterUnavailable       the writer is closed, failed, or has too much to do
    └── WriteGivenUp            the write did not begin in time, and never will
"""

from collections.abc import Sequence


class BillingError(Exception):
    """Root of billing's errors."""


class InsufficientBalance(BillingError):
    """The worst case of a request is above what a prepaid organisation has left."""

    def __init__(self, organization_id: str, *, needed_nanos: int) -> None:
        super().__init__(f"Balance of {organization_id} is below the worst case: {needed_nanos}")
        self.organization_id = organization_id
        self.needed_nanos = needed_nanos


class UnknownOrganization(BillingError):
    """No organisation has this id."""

    def __init__(self, organization_id: str) -> None:
        super().__init__(f"Unknown organization: {organization_id}")
        self.organization_id = organization_id


class NotPrepaid(BillingError):
    """A postpaid organisation pays what it used; money paid in advance would lie there unused."""

    def __init__(self, organization_id: str) -> None:
        super().__init__(
            f"Organization is postpaid, so it has no balance to top up: {organization_id}"
        )
        self.organization_id = organization_id


class UnknownWorkspace(BillingError):
    """The organisation has no workspace of this id."""

    def __init__(self, workspace_id: str, *, organization_id: str) -> None:
        super().__init__(f"Unknown workspace in {organization_id}: {workspace_id}")
        self.workspace_id = workspace_id
        self.organization_id = organization_id


class UnknownKey(BillingError):
    """No API key has this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"Unknown key: {key_id}")
        self.key_id = key_id


class UnknownPrice(BillingError):
    """No price card of the model is in force, so the model cannot be sold."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"No price card in force for model: {model_id}")
        self.model_id = model_id


class PriceCardFileError(BillingError):
    """The price card file cannot be used; the cards already published stay."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"Price card file {path}: {problem}")
        self.problem = problem


class PriceCardChanged(BillingError):
    """A published card was edited; prices change by a new version only."""

    def __init__(self, price_card_id: str) -> None:
        super().__init__(
            f"Price card is published with other content, add a new version: {price_card_id}"
        )
        self.price_card_id = price_card_id


class HoldNotFound(BillingError):
    """No hold was opened under this request id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"No hold for request: {request_id}")
        self.request_id = request_id


class HoldNotOpen(BillingError):
    """The hold is settled or released already."""

    def __init__(self, request_id: str, *, state: str) -> None:
        super().__init__(f"The hold of {request_id} is not open, it is {state}")
        self.request_id = request_id
        self.state = state


class HoldInUse(BillingError):
    """The gateway of an open hold runs and will close it by itself."""

    def __init__(self, request_id: str, *, owner_boot_id: str) -> None:
        super().__init__(
            f"The gateway {owner_boot_id} runs and will close the hold of {request_id} itself;"
            " --force closes it all the same"
        )
        self.request_id = request_id
        self.owner_boot_id = owner_boot_id


class RowUnreadable(BillingError):
    """A stored value is not what its column holds; a row as the ledger writes it is readable."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"A stored row cannot be read, column {column}: {problem}")
        self.column = column


class OwnerEnded(BillingError):
    """A gateway writes after its end: another one took it for dead, and closes its holds."""

    def __init__(self, boot_id: str) -> None:
        super().__init__(f"This gateway has been taken for dead and must start anew: {boot_id}")
        self.boot_id = boot_id


class OtherEngine(BillingError):
    """A running gateway of this database uses another engine: one engine a database, for now."""

    def __init__(self, boot_id: str, *, beats: int) -> None:
        super().__init__(
            "Another gateway of this database uses another engine, and several engines are not"
            f" supported yet: stop it, or set KVMETER_ENGINE_URL to its engine ({boot_id})"
        )
        self.boot_id = boot_id
        self.beats = beats


class HoldNotOwned(BillingError):
    """The hold belongs to another gateway, which took it over."""

    def __init__(self, request_id: str, *, owner_boot_id: str) -> None:
        super().__init__(f"The hold of {request_id} belongs to another gateway: {owner_boot_id}")
        self.request_id = request_id
        self.owner_boot_id = owner_boot_id


class TransferConflict(BillingError):
    """A transfer id was used before for another organisation or amount."""

    def __init__(self, transfer_id: str) -> None:
        super().__init__(f"Transfer id was used before with other values: {transfer_id}")
        self.transfer_id = transfer_id


class InconsistentFacts(BillingError):
    """The engine's numbers contradict the hold or each other; the hold stays open."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"Engine facts of {request_id} cannot be settled: {problem}")
        self.request_id = request_id


class DatabaseUrlError(BillingError):
    """The database URL is not one that kvmeter can use."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"Database URL cannot be used: {problem}")


class DatabaseUnreachable(BillingError):
    """The database cannot be reached, or the file is not a database."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"The database at {url} cannot be opened: {problem}")


class DatabaseNotMigrated(BillingError):
    """The schema is missing or is not the one this code was written for."""

    def __init__(self, *, found: str | None, expected: str) -> None:
        super().__init__(
            f"The database is not migrated (found {found or 'no schema'}, expected {expected}):"
            " run `kvmeter migrate`"
        )
        self.found = found
        self.expected = expected


class SchemaDamaged(BillingError):
    """Triggers, constraints or indexes that the ledger relies on are missing or changed."""

    def __init__(self, damaged: Sequence[str]) -> None:
        names = ", ".join(damaged)
        super().__init__(f"The database schema is damaged, missing or changed: {names}")
        self.damaged = tuple(damaged)


class WriterUnavailable(BillingError):
    """The writer is closed, failed, or has too much to do; nothing was written."""


class WriteGivenUp(WriterUnavailable):
    """The write did not begin in time, or was undone; nothing was written, or ever will be."""

    def __init__(self) -> None:
        super().__init__("The database did not take the write in time")
