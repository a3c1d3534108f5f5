"""Lease, Reservation and StoredPrefix: the values that leases, tiers and sequences share."""

import hashlib
from dataclasses import dataclass, field

from engine.blocks.prefix_index import TOKEN_BYTES, Prefix
from engine.protocol import LeaseReport, ReportReason

_OWNER_FIELD = b"kvmeter/owner/1\0"


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to keep one exact prefix until a deadline.

    id            unique; the same prefix leased again later has another id
    number        leases made before it in this engine process
    request_id    the request whose breakpoint it is
    owner         digest of its namespace
    key           key of its prefix; a prefix has at most one live lease
    blocks        the pinned blocks that hold it; empty while only other tiers hold it
    persist       whether it is kept on disk, so that it outlives the engine process
    copies        tiers that hold a whole copy of it, fastest first

    The other fields belong to `engine.leases.pin_meter`.
    """

    id: str
    number: int
    request_id: str
    owner: bytes
    key: bytes
    num_tokens: int
    blocks: tuple[int, ...]
    deadline_ms: int
    persist: bool
    copies: tuple[str, ...] = ()
    num_paid_blocks: int = 0
    since_ms: int = 0
    last_use: int = 0
    is_contended: bool = False
    idle_block_ms: int = 0
    contended_block_ms: int = 0

    @property
    def tier(self) -> str:
        """The fastest tier that holds it; empty once it is lost."""
        return "device" if self.blocks else "".join(self.copies[:1])

    def report(self, reason: ReportReason, *, block_bytes: int) -> LeaseReport:
        """Return what the lease had cost when the meter last settled it."""
        return LeaseReport(
            lease_id=self.id,
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            reason=reason,
            tier=self.tier,
            num_bytes=len(self.blocks) * block_bytes,
            idle_block_ms=self.idle_block_ms,
            contended_block_ms=self.contended_block_ms,
        )


@dataclass(slots=True, eq=False)
class Reservation:
    """The blocks that one request was granted and has not leased yet; its breakpoints share it.

    blocks           the request's first blocks, pinned: matched at admission or committed since
    num_blocks       all granted blocks; those past `blocks` are counted, not pinned
    num_tokens       how many of the request's tokens are valid in `blocks`
    num_outstanding  granted breakpoints that are not committed yet
    """

    owner: bytes
    request_id: str = ""
    blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    num_tokens: int = 0
    num_outstanding: int = 0


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A lease as a tier outside the KV pool stores it, beside the KV itself.

    parent_key    key of the last full block before the prefix's end; a search starts from it
    token_ids     all token ids of the prefix, packed; a search compares them
    """

    lease_id: str
    request_id: str
    owner: bytes
    key: bytes
    parent_key: bytes
    token_ids: bytes

    @property
    def num_tokens(self) -> int:
        """The prefix's length."""
        return len(self.token_ids) // TOKEN_BYTES


def owner_of(namespace: bytes) -> bytes:
    """Return a namespace's digest, which identifies it where it need not be known itself."""
    return hashlib.sha256(_OWNER_FIELD + namespace).digest()


def stored_prefix(lease: Lease, prefix: Prefix) -> StoredPrefix:
    """Return what a tier stores of the lease of `prefix`."""
    assert prefix.parent is not None, "a lease has tokens"
    nodes = []
    node: Prefix = prefix
    while node.parent is not None:
        nodes.append(node.token_ids)
        node = node.parent
    return StoredPrefix(
        lease_id=lease.id,
        request_id=lease.request_id,
        owner=lease.owner,
        key=lease.key,
        parent_key=prefix.parent.key,
        token_ids=b"".join(reversed(nodes)),
    )
