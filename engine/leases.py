"""Leases: prefixes pinned until a deadline, within a cap for all and a quota for each namespace.

    admission            answer() refuses, refreshes, or reserves: blocks that exist are pinned
                         at once, those still to be computed are counted
    commit of a step     commit() pins what the step computed and turns the reservation to a lease
    end of the request   cancel() gives back what was reserved and never committed
    deadline             expire() unpins; the blocks become the next to be evicted

Held = distinct pinned blocks + blocks counted by reservations. It never exceeds the cap, so a
pool that is larger than the cap by one request can always finish one request.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.prefix_index import Prefix
from engine.protocol import Breakpoint, Grant


@dataclass(slots=True, eq=False)
class Lease:
    """The pin of one exact prefix. Its identity is the prefix's key, namespace included."""

    namespace: bytes
    key: bytes
    blocks: tuple[int, ...]
    deadline_ms: int


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request was granted and has not committed yet; nested breakpoints share it.

    blocks           the request's first blocks, pinned: matched at admission or committed since
    num_blocks       all blocks it was granted; those past `blocks` are counted, not pinned
    tokens           how many tokens of the request are valid in `blocks`
    num_outstanding  granted breakpoints still to be committed
    """

    namespace: bytes
    blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    tokens: int = 0
    num_outstanding: int = 0


class LeaseBook:
    """Every lease and reservation of one engine."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        """Start without leases on an empty pool."""
        self._config = config
        self._pool = pool
        self._leases: dict[bytes, Lease] = {}
        # One item a lease: its deadline may lie before the lease's own, never after it.
        self._deadlines: list[tuple[int, int, Lease]] = []
        self._serial = count()
        self._reservations: set[Reservation] = set()
        self._held: Counter[bytes] = Counter()
        self._num_held = 0
        self.num_expired = 0

    @property
    def num_live(self) -> int:
        """Leases that have not expired."""
        return len(self._leases)

    @property
    def num_held(self) -> int:
        """Distinct pinned blocks plus those counted by reservations."""
        return self._num_held

    def reserve(self, namespace: bytes) -> Reservation:
        """Open the reservation of one request; it holds nothing yet."""
        reservation = Reservation(namespace)
        self._reservations.add(reservation)
        return reservation

    def answer(
        self,
        breakpoint_: Breakpoint,
        prefix: Prefix,
        reservation: Reservation,
        *,
        matched: Sequence[int],
        deadline_ms: int,
    ) -> Grant:
        """Answer one breakpoint of a request that was admitted with `matched` blocks attached.

        Breakpoints of one request are answered in ascending order.
        """
        grant = Grant(tokens=breakpoint_.tokens, write=breakpoint_.write, outcome="granted")
        if not self._config.enable_prefix_caching:
            return replace(grant, outcome="refused", reason="caching_disabled")
        if breakpoint_.tokens < self._config.min_lease_tokens:
            return replace(grant, outcome="refused", reason="too_short")
        if (lease := self._leases.get(prefix.key)) is not None:
            lease.deadline_ms = max(lease.deadline_ms, deadline_ms)
            return replace(grant, outcome="refreshed")

        num_blocks = self._config.blocks_for(breakpoint_.tokens)
        existing = matched[reservation.num_blocks : num_blocks]
        num_pinned = sum(self._pool.is_pinned(block) for block in existing)
        num_new = num_blocks - reservation.num_blocks - num_pinned
        if self._held[reservation.namespace] + num_new > self._config.namespace_quota_blocks:
            return replace(grant, outcome="refused", reason="quota")
        if self._num_held + num_new > self._config.pin_cap_blocks:
            return replace(grant, outcome="refused", reason="capacity")

        for block in existing:
            self._pin(reservation.namespace, block)
        reservation.blocks.extend(existing)
        reservation.tokens = len(reservation.blocks) * self._config.block_size
        self._count(reservation.namespace, num_blocks - reservation.num_blocks - len(existing))
        reservation.num_blocks = num_blocks
        reservation.num_outstanding += 1
        return grant

    def commit(
        self,
        reservation: Reservation,
        prefix: Prefix,
        *,
        tokens: int,
        table: Sequence[int],
        deadline_ms: int,
    ) -> None:
        """Turn the reservation of the first `tokens` tokens, now computed, into a lease.

        Another request may have made the lease meanwhile; then it is refreshed.
        """
        num_blocks = self._config.blocks_for(tokens)
        for block in table[len(reservation.blocks) : num_blocks]:
            self._count(reservation.namespace, -1)
            self._pin(reservation.namespace, block)
            reservation.blocks.append(block)
        reservation.tokens = max(reservation.tokens, tokens)

        if (lease := self._leases.get(prefix.key)) is not None:
            lease.deadline_ms = max(lease.deadline_ms, deadline_ms)
        else:
            blocks = tuple(reservation.blocks[:num_blocks])
            for block in blocks:
                self._pin(reservation.namespace, block)
            lease = Lease(reservation.namespace, prefix.key, blocks, deadline_ms)
            self._leases[prefix.key] = lease
            heapq.heappush(self._deadlines, (deadline_ms, next(self._serial), lease))
        reservation.num_outstanding -= 1
        if reservation.num_outstanding == 0:
            self.cancel(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """Give back all that the reservation holds; doing so twice changes nothing."""
        if reservation not in self._reservations:
            return
        self._reservations.remove(reservation)
        self._count(reservation.namespace, len(reservation.blocks) - reservation.num_blocks)
        for block in reversed(reservation.blocks):
            self._unpin(reservation.namespace, block, cold=False)
        reservation.blocks.clear()
        reservation.num_blocks = reservation.tokens = 0

    def expire(self, now_ms: int) -> None:
        """End every lease whose deadline has come."""
        while (next_ms := self.next_expiry_ms()) is not None and next_ms <= now_ms:
            _, _, lease = heapq.heappop(self._deadlines)
            del self._leases[lease.key]
            self.num_expired += 1
            # In table order: the last one to become cold is the first to be evicted.
            for block in lease.blocks:
                self._unpin(lease.namespace, block, cold=True)

    def next_expiry_ms(self) -> int | None:
        """The earliest deadline of a live lease."""
        while self._deadlines:
            deadline_ms, serial, lease = self._deadlines[0]
            if deadline_ms == lease.deadline_ms:
                return deadline_ms
            heapq.heapreplace(self._deadlines, (lease.deadline_ms, serial, lease))
        return None

    def pins(self) -> list[int]:
        """The pin count that each block should have."""
        pins = [0] * self._pool.num_blocks
        for holder in self._holders():
            for block in holder.blocks:
                pins[block] += 1
        return pins

    def check_integrity(self) -> None:
        """Assert that held blocks are counted right, within the cap and within each quota."""
        held: Counter[bytes] = Counter()
        holders = self._holders()
        for namespace in {holder.namespace for holder in holders}:
            own = [holder for holder in holders if holder.namespace == namespace]
            held[namespace] = len({block for holder in own for block in holder.blocks})
        for reservation in self._reservations:
            held[reservation.namespace] += reservation.num_blocks - len(reservation.blocks)
        assert +held == +self._held, "held blocks miscounted"
        assert self._num_held == held.total(), "total of held blocks miscounted"
        assert self._num_held <= self._config.pin_cap_blocks, f"pin cap broken: {self._num_held}"
        for namespace, num_held in held.items():
            quota = self._config.namespace_quota_blocks
            assert num_held <= quota, f"quota broken: {namespace!r} holds {num_held}"
        assert len(self._deadlines) == len(self._leases), "a lease without its one deadline"

    def _holders(self) -> list[Lease | Reservation]:
        return [*self._leases.values(), *self._reservations]

    def _pin(self, namespace: bytes, block: int) -> None:
        if self._pool.pin(block):
            self._count(namespace, 1)

    def _unpin(self, namespace: bytes, block: int, *, cold: bool) -> None:
        if self._pool.unpin(block, cold=cold):
            self._count(namespace, -1)

    def _count(self, namespace: bytes, num_blocks: int) -> None:
        self._num_held += num_blocks
        self._held[namespace] += num_blocks
        if self._held[namespace] == 0:
            del self._held[namespace]
