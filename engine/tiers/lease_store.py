"""The lease store: copies of leases in the tiers outside the KV pool, found by prefix.

save      copy a committed lease out of the pool to each tier where that pays
find      the longest stored prefix of a sequence, by comparing token ids and owner
load      the payload from the fastest tier; a damaged copy is dropped
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.blocks.prefix_index import Prefix, PrefixChain
from engine.errors import DeviceLost
from engine.lease_types import Lease, StoredPrefix, owner_of, stored_prefix
from engine.tiers.tier import Costs, Payload, Recovered, Snapshot, Tier

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stored:
    """A stored lease: the tiers with a complete copy, fastest first, and those saving one."""

    prefix: StoredPrefix
    num_bytes: int
    tiers: list[Tier]
    saving: list[Tier] = field(default_factory=list)


class LeaseStore:
    """All copies of leases outside the KV pool. Without tiers it stores and finds nothing."""

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        *,
        costs: Costs | None = None,
        snapshot: Snapshot | None = None,
        block_size: int = 16,
        block_bytes: int = 1,
    ) -> None:
        """`tiers` are ordered fastest first."""
        assert not tiers or (costs and snapshot), "tiers need costs and a snapshot"
        self._tiers = tuple(tiers)
        self._costs = costs
        self._snapshot = snapshot
        self._block_size, self._block_bytes = block_size, block_bytes
        self._stored: dict[bytes, _Stored] = {}
        self._under: dict[bytes, list[_Stored]] = {}  # by the key of the last full block before
        self._num_skipped = 0

    def recover(self) -> list[Recovered]:
        """Return the leases that the tiers still hold after a restart."""
        found = []
        for tier in self._tiers:
            for recovered in tier.recover():
                self._add(_Stored(recovered.stored, recovered.num_bytes, [tier]))
                found.append(recovered)
        return found

    def save(self, lease: Lease, prefix: Prefix, *, spare: Iterable[Lease]) -> list[bytes]:
        """Copy a lease to every tier where that pays, and return the keys that lost a copy.

        The source is its blocks in the pool or, without blocks, the fastest tier that has it.
        `spare` are leases that need no copy: a full tier drops copies of those that expire before
        this one, earliest first.
        """
        stored = self._stored.get(lease.key)
        num_bytes = stored.num_bytes if stored else len(lease.blocks) * self._block_bytes
        displaced: list[bytes] = []
        targets = []
        for tier in self._tiers if lease.blocks else self._below(lease.key):
            if not self._should_save(tier, lease, num_bytes):
                continue
            if tier.accepts(num_bytes):
                displaced += self._drop_copies_for(tier, lease, num_bytes, spare)
            if tier.accepts(num_bytes) and tier.free_bytes >= num_bytes:
                targets.append(tier)
            else:
                self._num_skipped += 1
        if targets and not self._save_in(lease, prefix, targets, num_bytes):
            displaced.append(lease.key)
        return displaced

    def poll(self) -> list[bytes]:
        """Return the keys of leases of which a save ended or failed since the last call."""
        ended = []
        for tier in self._tiers:
            for key, is_saved in tier.poll():
                stored = self._stored[key]
                stored.saving.remove(tier)
                if is_saved:
                    stored.tiers = [t for t in self._tiers if t is tier or t in stored.tiers]
                elif not (stored.tiers or stored.saving):
                    self.drop(key)
                ended.append(key)
        return ended

    def find(self, chain: PrefixChain, num_tokens: int, *, matched: int) -> bytes | None:
        """Return the key of the longest stored prefix of the chain that pays to read, or None.

        It lies within the first `num_tokens` tokens, of which `matched` are in the pool already:
        reading those saves nothing. Changes nothing.
        """
        if not self._stored:
            return None
        for block in range(num_tokens // self._block_size, matched // self._block_size - 1, -1):
            start = block * self._block_size
            candidates = [
                stored
                for stored in self._under.get(chain.at(start).key, ())
                if start + self._block_size >= stored.prefix.num_tokens > matched
            ]
            for stored in sorted(candidates, key=lambda each: -each.prefix.num_tokens):
                if self._serves(stored, chain, num_tokens, matched=matched):
                    return stored.prefix.key
        return None

    def load(self, key: bytes, num_tokens: int) -> tuple[Payload, int, str] | None:
        """Return a stored lease's payload, how many of `num_tokens` tokens it holds, its tier.

        None if no tier has an undamaged copy; the lease is then removed from the store.
        """
        stored = self._stored[key]
        for tier in list(stored.tiers):
            payload = tier.load(key)
            if payload is not None:
                return payload, min(num_tokens, stored.prefix.num_tokens), tier.name
            stored.tiers.remove(tier)
            tier.drop(key)
        if not stored.saving:
            self.drop(key)
        return None

    def tiers_of(self, key: bytes) -> tuple[str, ...]:
        """Return the names of the tiers that have a complete copy, fastest first."""
        stored = self._stored.get(key)
        return tuple(tier.name for tier in stored.tiers) if stored else ()

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """Move a lease's deadline in every tier; ignored if it is not stored."""
        if key in self._stored:
            for tier in self._tiers:
                tier.extend(key, deadline_ms)

    def drop(self, key: bytes) -> None:
        """Remove a lease from every tier, also while it is being saved. Idempotent."""
        stored = self._stored.pop(key, None)
        if stored is None:
            return
        siblings = self._under[stored.prefix.parent_key]
        siblings.remove(stored)
        if not siblings:
            del self._under[stored.prefix.parent_key]
        for tier in self._tiers:
            tier.drop(key)

    def sync(self) -> None:
        """Return once what was dropped stays dropped after a power cut."""
        for tier in self._tiers:
            tier.sync()

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by metric name."""
        gauges: dict[str, float] = {"lease_saves_skipped_total": self._num_skipped}
        for tier in self._tiers:
            gauges |= tier.stats()
        return gauges

    def _drop_copies_for(
        self, tier: Tier, lease: Lease, num_bytes: int, spare: Iterable[Lease]
    ) -> list[bytes]:
        """Drop spare copies in one tier until the lease fits or none is left; return their keys."""
        if tier.free_bytes >= num_bytes:
            return []
        displaced = []
        sooner = [each for each in spare if each.deadline_ms < lease.deadline_ms]
        for each in sorted(sooner, key=lambda each: each.deadline_ms):
            stored = self._stored.get(each.key)  # None if another tier dropped its last copy
            if stored is not None and tier in stored.tiers:
                stored.tiers.remove(tier)
                tier.drop(each.key)
                displaced.append(each.key)
                if not (stored.tiers or stored.saving):
                    self.drop(each.key)
            if tier.free_bytes >= num_bytes:
                break
        return displaced

    def _below(self, key: bytes) -> tuple[Tier, ...]:
        """Return the tiers below the fastest one that has a complete copy."""
        fastest = self._stored[key].tiers[:1]
        return self._tiers[self._tiers.index(fastest[0]) + 1 :] if fastest else ()

    def _save_in(
        self, lease: Lease, prefix: Prefix, targets: Sequence[Tier], num_bytes: int
    ) -> bool:
        """Start to save a lease in these tiers; False if the copy to read from is damaged."""
        assert self._snapshot is not None, "tiers come with a snapshot"
        if lease.blocks:
            try:
                payload = self._snapshot(lease.blocks, lease.num_tokens)
            except DeviceLost:
                raise
            except Exception:  # no memory for the copy, mostly; the lease stays in the pool
                log.exception("lease_save_failed", extra={"lease_id": lease.id})
                self._num_skipped += 1
                return True
        elif (found := self.load(lease.key, lease.num_tokens)) is not None:
            payload, _, _ = found
        else:
            return False
        stored = self._stored.get(lease.key)
        if stored is None:
            stored = _Stored(stored_prefix(lease, prefix), num_bytes, [])
            self._add(stored)
        for tier in targets:
            stored.saving.append(tier)
            tier.save(stored.prefix, payload, num_bytes=num_bytes, deadline_ms=lease.deadline_ms)
        return True

    def _should_save(self, tier: Tier, lease: Lease, num_bytes: int) -> bool:
        assert self._costs is not None, "tiers come with costs"
        stored = self._stored.get(lease.key)
        if stored is not None and tier in (*stored.tiers, *stored.saving):
            return False
        if not (tier.keeps_all or lease.persist):
            return False
        return self._costs.pays(tier.name, num_bytes=num_bytes, num_tokens=lease.num_tokens)

    def _serves(
        self, stored: _Stored, chain: PrefixChain, num_tokens: int, *, matched: int
    ) -> bool:
        """Whether the stored prefix equals the chain's, has a complete copy, and pays to read."""
        prefix = stored.prefix
        if not stored.tiers or prefix.num_tokens > num_tokens:
            return False
        if prefix.owner != owner_of(chain.namespace):
            return False
        if prefix.token_ids != chain.packed(0, prefix.num_tokens):
            return False
        assert self._costs is not None, "tiers come with costs"
        num_saved = min(prefix.num_tokens, num_tokens - 1) - matched
        tier = stored.tiers[0].name
        return num_saved > 0 and self._costs.pays(
            tier, num_bytes=stored.num_bytes, num_tokens=num_saved
        )

    def _add(self, stored: _Stored) -> None:
        self._stored[stored.prefix.key] = stored
        self._under.setdefault(stored.prefix.parent_key, []).append(stored)
