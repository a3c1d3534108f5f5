"""Decides each breakpoint (grant, refresh, refuse), makes leases at commit, and ends them.

    admission            decide() refuses, refreshes, or reserves: existing blocks are pinned at
                         once, blocks still to be computed are counted
    commit of a step     commit() pins the computed blocks and turns the reservation into a lease
    end of the request   cancel() frees what was reserved and never committed
    blocks are short     unpin_spilled() unpins a lease that another tier holds; it stays granted
    deadline, unpin      the lease ends in every tier; its blocks are the next to be evicted

Held = distinct pinned blocks + blocks counted by reservations. It never exceeds the cap, so a
pool that is larger than the cap by one request can always finish one request.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.blocks.pool import BlockPool
from engine.blocks.prefix_index import Match, Prefix, PrefixChain, Restored
from engine.config import EngineConfig
from engine.lease_types import Lease, Reservation, owner_of
from engine.leases.holdings import Holdings
from engine.leases.lease_table import LeaseTable
from engine.leases.pin_meter import PinMeter
from engine.leases.reservations import Reservations
from engine.protocol import Breakpoint, Grant, LeaseReport, ReportReason
from engine.tiers.lease_store import LeaseStore

COUNTED = ("expired", "unpinned", "lost", "dropped", "given_up")


class Leases:
    """Every lease and reservation of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        store: LeaseStore,
        *,
        boot_id: str = "",
    ) -> None:
        """Start with the leases that `store` kept through a restart; none of them is pinned."""
        self._config = config
        self._pool = pool
        self._store = store
        self._boot_id = boot_id
        self._now_ms = 0
        self._holdings = Holdings(config, pool)
        self.meter = PinMeter(pool, config.block_size)
        self._leases = LeaseTable()
        # Leases that are pinned and whole in another tier too, least recently read first.
        self._spilled: dict[Lease, None] = {}
        self._reservations = Reservations(config, pool, self._holdings)
        self.reports: list[LeaseReport] = []  # the engine core takes and clears them
        self._num_made = 0
        self.counts: dict[str, float] = {f"lease_{what}_total": 0 for what in COUNTED}
        for recovered in self._store.recover():
            stored = recovered.stored
            lease = self._make(
                stored.lease_id,
                request_id=stored.request_id,
                owner=stored.owner,
                key=stored.key,
                num_tokens=stored.num_tokens,
                blocks=(),
                deadline_ms=recovered.deadline_ms,
                persist=True,
            )
            lease.copies = self._store.tiers_of(lease.key)

    @property
    def num_live(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def num_held(self) -> int:
        """Distinct pinned blocks plus those counted by reservations."""
        return self._holdings.num_held

    def reserve(self, namespace: bytes, request_id: str = "") -> Reservation:
        """Open an empty reservation for one request."""
        return self._reservations.open(owner_of(namespace), request_id)

    def decide(
        self,
        breakpoint_: Breakpoint,
        prefix: Prefix,
        reservation: Reservation,
        *,
        matched: Sequence[int],
        deadline_ms: int,
    ) -> Grant:
        """Return the grant for one breakpoint of a request that has `matched` blocks attached.

        The breakpoints of one request are decided in ascending order.
        """
        grant = Grant(num_tokens=breakpoint_.num_tokens, write=breakpoint_.write, outcome="granted")
        if not self._config.enable_prefix_caching:
            return replace(grant, outcome="refused", reason="caching_disabled")
        if breakpoint_.num_tokens < self._config.min_lease_tokens:
            return replace(grant, outcome="refused", reason="too_short")
        lease = self._refresh(prefix, deadline_ms=deadline_ms, persist=breakpoint_.persist)
        if lease is not None:
            return replace(grant, outcome="refreshed", lease_id=lease.id)
        reason = self._reservations.add(
            reservation, breakpoint_.num_tokens, matched, unpin_spilled=self.unpin_spilled
        )
        if reason is not None:
            return replace(grant, outcome="refused", reason=reason)
        return grant

    def commit(
        self,
        reservation: Reservation,
        prefix: Prefix,
        *,
        num_tokens: int,
        table: Sequence[int],
        deadline_ms: int,
        persist: bool = False,
    ) -> str:
        """Lease the first `num_tokens` tokens, which are computed now; returns the lease's id."""
        self._reservations.advance(reservation, num_tokens, table)
        if (lease := self._refresh(prefix, deadline_ms=deadline_ms, persist=persist)) is None:
            blocks = tuple(reservation.blocks[: self._config.blocks_for(num_tokens)])
            for block in blocks:
                self._holdings.pin(reservation.owner, block)
            lease = self._make(
                request_id=reservation.request_id,
                owner=reservation.owner,
                key=prefix.key,
                num_tokens=num_tokens,
                blocks=blocks,
                deadline_ms=deadline_ms,
                persist=persist,
            )
            self.meter.hold(lease, self._now_ms)
            self._save(lease, prefix)
        self._reservations.settle_one(reservation)
        return lease.id

    def cancel(self, reservation: Reservation) -> None:
        """Free all that a reservation holds. Idempotent."""
        self._reservations.cancel(reservation)

    def restore(self, chain: PrefixChain, num_tokens: int, match: Match) -> Match:
        """Return the match, lengthened by the longest stored lease beyond it, if that pays.

        At least one of `num_tokens` tokens is left to compute. A lease whose last copy turns out
        damaged ends as lost.
        """
        if not self._config.enable_prefix_caching:
            return match
        while (key := self._store.find(chain, num_tokens, matched=match.num_tokens)) is not None:
            found = self._store.load(key, num_tokens - 1)
            self._take_copies(key)
            if found is not None:
                payload, num_restored, tier = found
                restored = Restored(payload, tier, num_restored - match.num_tokens)
                return Match(match.blocks, num_restored, None, match.prefixes, restored)
        return match

    def unpin_spilled(self, owner: bytes | None = None) -> bool:
        """Unpin a spilled lease (of one owner); returns whether there was one."""
        lease = next((each for each in self._spilled if owner in (None, each.owner)), None)
        if lease is not None:
            self._unpin(lease)
            self.counts["lease_given_up_total"] += 1
        return lease is not None

    def count_freed_by_unpinning(self) -> int:
        """Return how many blocks would become free if every spilled lease were unpinned."""
        pins = Counter(block for lease in self._spilled for block in lease.blocks)
        return sum(self._pool.is_freed_by(num_pins, block) for block, num_pins in pins.items())

    def expire(self, now_ms: int) -> None:
        """Set the time, record which copies are complete, and end every lease that is due."""
        self._now_ms = now_ms
        self.meter.tick(now_ms)
        for key in self._store.poll():
            self._take_copies(key)
        while (lease := self._leases.next_due()) is not None and lease.deadline_ms <= now_ms:
            self._end(lease, "expired")

    def end(self, *, lease_ids: Iterable[str], namespaces: Iterable[bytes], now_ms: int) -> int:
        """End these leases and those of these namespaces, in every tier; returns how many.

        Unknown ids and namespaces are ignored.
        """
        self._now_ms = now_ms
        owners = {owner_of(namespace) for namespace in namespaces}
        leases = {lease for id_ in lease_ids if (lease := self._leases.of_id(id_)) is not None}
        if owners:
            leases |= {lease for lease in self._leases if lease.owner in owners}
        for lease in leases:
            self._end(lease, "unpinned")
        return len(leases)

    def drop_next(self) -> bool:
        """End the lease with the earliest deadline; returns whether there was one."""
        if (lease := self._leases.next_due()) is None:
            return False
        self._end(lease, "dropped")
        return True

    def report_all(self, now_ms: int) -> None:
        """Report every lease before the engine stops."""
        self._now_ms = now_ms
        for lease in self._leases:
            self._report(lease, "stopped")

    def next_expiry_ms(self) -> int | None:
        """Return the earliest deadline of all live leases."""
        return lease.deadline_ms if (lease := self._leases.next_due()) else None

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name."""
        return self.counts | self._store.stats()

    def pins(self) -> list[int]:
        """Return the pin count that each block should have."""
        pins = [0] * self._pool.num_blocks
        for holder in (*self._leases, *self._reservations):
            for block in holder.blocks:
                pins[block] += 1
        return pins

    def check_integrity(self) -> None:
        """Assert that held blocks are counted correctly and that every lease is whole somewhere."""
        self._holdings.check_integrity(self._leases, self._reservations)
        self._leases.check_integrity()
        leased = {block for lease in self._leases for block in lease.blocks}
        num_paid = sum(lease.num_paid_blocks for lease in self._leases)
        assert num_paid == self.meter.num_leased_blocks() == len(leased), "blocks not paid once"

    def _make(self, lease_id: str | None = None, **fields: Any) -> Lease:
        """Add a lease; one that an earlier engine process made keeps its id."""
        number = self._num_made
        self._num_made += 1
        lease = Lease(lease_id or f"{self._boot_id}:{number}", number, **fields)
        self._leases.add(lease)
        return lease

    def _refresh(self, prefix: Prefix, *, deadline_ms: int, persist: bool) -> Lease | None:
        """Extend the live lease of a prefix; returns None if there is none or it turns out lost."""
        if (lease := self._leases.of_prefix(prefix.key)) is None:
            return None
        if deadline_ms > lease.deadline_ms:
            lease.deadline_ms = deadline_ms
            self._store.extend(lease.key, deadline_ms)
        lease.persist |= persist
        if lease.blocks:
            self.meter.use(lease, self._now_ms)
        if lease in self._spilled:
            self._spilled[lease] = self._spilled.pop(lease)
        self._report(lease, "refreshed")
        self._save(lease, prefix)  # if it could not be saved before, or did not persist
        return self._leases.of_prefix(prefix.key)

    def _save(self, lease: Lease, prefix: Prefix) -> None:
        for key in self._store.save(lease, prefix, spare=self._spilled):
            self._take_copies(key)

    def _take_copies(self, key: bytes) -> None:
        """Record which tiers hold a lease whole; one that neither they nor blocks hold is lost."""
        lease = self._leases.of_prefix(key)
        assert lease is not None, "the store keeps what was never leased"
        lease.copies = self._store.tiers_of(key)
        if lease.copies and lease.blocks:
            self._spilled[lease] = None
        else:
            self._spilled.pop(lease, None)
        if not (lease.copies or lease.blocks):
            self._end(lease, "lost")

    def _unpin(self, lease: Lease) -> None:
        """Unpin a lease's blocks in table order, so that its last block is evicted first."""
        if lease.blocks:
            self.meter.release(lease, self._now_ms)
        for block in lease.blocks:
            self._holdings.unpin(lease.owner, block, cold=True)
        lease.blocks = ()
        self._spilled.pop(lease, None)

    def _end(self, lease: Lease, reason: ReportReason) -> None:
        """End a lease in every tier."""
        self._report(lease, reason)
        self._unpin(lease)
        self._store.drop(lease.key)
        self._leases.remove(lease)
        self.counts[f"lease_{reason}_total"] += 1

    def _report(self, lease: Lease, reason: ReportReason) -> None:
        if lease.blocks:
            self.meter.settle(lease, self._now_ms)
        self.reports.append(lease.report(reason, block_bytes=self._config.block_bytes))
