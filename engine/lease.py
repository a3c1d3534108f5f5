"""What a lease is, what is reserved for one, and what a tier keeps of one."""

import hashlib
from dataclasses import dataclass, field

from engine.blocks.prefix_index import TOKEN_BYTES, Prefix
from engine.protocol import LeaseReport, ReportReason

_OWNER_FIELD = b"kvmeter/owner/1\0"


@dataclass(slots=True, eq=False)
class Lease:
    """The promise of one exact prefix until a deadline. Its identity is the prefix's key.

    id            names this lease once and for all; the same prefix leased again has another id
    number        leases made before it, in this engine process
    request_id    the request whose breakpoint made it
    owner         digest of its namespace
    blocks        the pinned blocks that hold it; empty once it lives in other tiers only
    persist       whether it is kept on disk, so that it outlives the engine
    copies        tiers that hold a whole copy of it, fastest first

    The rest is the meter's, in milliseconds times blocks: see `engine.leases.pin_meter`.
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
        """What the lease has cost, as settled last."""
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
    """What one request was granted and has not committed yet; nested breakpoints share it.

    blocks           the request's first blocks, pinned: matched at admission or committed since
    num_blocks       all blocks it was granted; those past `blocks` are counted, not pinned
    tokens           how many tokens of the request are valid in `blocks`
    num_outstanding  granted breakpoints still to be committed
    """

    owner: bytes
    request_id: str = ""
    blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    tokens: int = 0
    num_outstanding: int = 0


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A lease as a tier outside the KV pool knows it: enough to find it, to check it, to make it.

    `parent_key` is the key of the prefix's last full block before its end, where a search looks;
    `tokens` are all of its token ids, packed: a search compares them.
    """

    lease_id: str
    request_id: str
    owner: bytes
    key: bytes
    parent_key: bytes
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """The prefix's exact length."""
        return len(self.tokens) // TOKEN_BYTES


def owner_of(namespace: bytes) -> bytes:
    """What stands for a namespace where the namespace itself need not be known: its digest."""
    return hashlib.sha256(_OWNER_FIELD + namespace).digest()


def stored_prefix(lease: Lease, prefix: Prefix) -> StoredPrefix:
    """The lease of `prefix` in a tier's terms."""
    assert prefix.parent is not None, "a lease has tokens"
    nodes = []
    node: Prefix = prefix
    while node.parent is not None:
        nodes.append(node.tokens)
        node = node.parent
    return StoredPrefix(
        lease_id=lease.id,
        request_id=lease.request_id,
        owner=lease.owner,
        key=lease.key,
        parent_key=prefix.parent.key,
        tokens=b"".join(reversed(nodes)),
    )
