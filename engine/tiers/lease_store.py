"""The lease store: leases in the tiers outside the KV pool, found by prefix.

save      a committed lease is copied out of the pool and handed to each tier that pays
find      the longest stored prefix of a sequence; its tokens and owner are compared
load      the payload from the fastest tier; a copy that is not whole any more is forgotten
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.blocks.prefix_index import Prefix, PrefixChain
from engine.lease import Lease, StoredPrefix, owner_of, stored_prefix
from engine.tiers.tier import Costs, Payload, Recovered, Snapshot, Tier


@dataclass(slots=True)
class _Stored:
    """One stored lease and the tiers that hold it whole, fastest first."""

    prefix: StoredPrefix
    num_bytes: int
    tiers: list[Tier]
    saving: list[Tier] = field(default_factory=list)


class LeaseStore:
    """Every lease outside the KV pool. Without tiers it keeps nothing and finds nothing."""

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        *,
        costs: Costs | None = None,
        snapshot: Snapshot | None = None,
        block_size: int = 16,
        block_bytes: int = 1,
    ) -> None:
        """`tiers` come fastest first."""
        assert not tiers or (costs and snapshot), "tiers need costs and a snapshot"
        self._tiers = tuple(tiers)
        self._costs = costs
        self._snapshot = snapshot
        self._block_size, self._block_bytes = block_size, block_bytes
        self._stored: dict[bytes, _Stored] = {}
        self._under: dict[bytes, list[_Stored]] = {}  # by the key of the last full block before
        self._num_skipped = 0

    def recover(self) -> list[Recovered]:
        """The leases that the tiers kept through a restart."""
        found = []
        for tier in self._tiers:
            for recovered in tier.recover():
                self._add(_Stored(recovered.stored, recovered.num_bytes, [tier]))
                found.append(recovered)
        return found

    def save(self, lease: Lease, prefix: Prefix, *, spare: Iterable[Lease]) -> list[bytes]:
        """Copy a lease to every tier that is worth it: from its blocks, which are computed.

        One without blocks is copied from the fastest tier that has it to slower ones. `spare` are
        leases that need no copy; in a full tier those of them that end before this one make room,
        soonest first. Returns the keys of all that lost a copy.
        """
        stored = self._stored.get(lease.key)
        num_bytes = stored.num_bytes if stored else len(lease.blocks) * self._block_bytes
        displaced: list[bytes] = []
        takers = []
        for tier in self._tiers if lease.blocks else self._below(lease.key):
            if not self._is_worth(tier, lease, num_bytes):
                continue
            if tier.accepts(num_bytes):
                displaced += self._make_room(tier, lease, num_bytes, spare)
            if tier.accepts(num_bytes) and tier.free_bytes >= num_bytes:
                takers.append(tier)
            else:
                self._num_skipped += 1
        if takers and not self._hand_over(lease, prefix, takers, num_bytes):
            displaced.append(lease.key)
        return displaced

    def poll(self) -> list[bytes]:
        """The leases whose saving has ended since the last call, well or not; see `tiers_of`."""
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
        """The longest stored prefix of the chain's first `num_tokens` tokens, if it is worth it.

        `matched` tokens need not be computed anyway. Changes nothing.
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
        """The payload of a stored lease, how many of `num_tokens` tokens it holds, its tier.

        None when no tier has it whole any more: then it is forgotten.
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
        """The tiers that hold a lease whole."""
        stored = self._stored.get(key)
        return tuple(tier.name for tier in stored.tiers) if stored else ()

    def extend(self, key: bytes, deadline_ms: int) -> None:
        """A lease lives longer, stored or not."""
        if key in self._stored:
            for tier in self._tiers:
                tier.extend(key, deadline_ms)

    def drop(self, key: bytes) -> None:
        """Forget a lease in every tier, also one that is being saved. Idempotent."""
        stored = self._stored.pop(key, None)
        if stored is None:
            return
        siblings = self._under[stored.prefix.parent_key]
        siblings.remove(stored)
        if not siblings:
            del self._under[stored.prefix.parent_key]
        for tier in self._tiers:
            tier.drop(key)

    def stats(self) -> dict[str, float]:
        """Gauges and counters by metric name."""
        gauges: dict[str, float] = {"lease_saves_skipped_total": self._num_skipped}
        for tier in self._tiers:
            gauges |= tier.stats()
        return gauges

    def _make_room(
        self, tier: Tier, lease: Lease, num_bytes: int, spare: Iterable[Lease]
    ) -> list[bytes]:
        """Drop copies in one tier until it has room, or until none is left that may go."""
        if tier.free_bytes >= num_bytes:
            return []
        displaced = []
        sooner = [each for each in spare if each.deadline_ms < lease.deadline_ms]
        for each in sorted(sooner, key=lambda each: each.deadline_ms):
            stored = self._stored.get(each.key)  # None once another tier made room of its last copy
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
        """The tiers that are slower than the fastest one that holds a lease whole."""
        fastest = self._stored[key].tiers[:1]
        return self._tiers[self._tiers.index(fastest[0]) + 1 :] if fastest else ()

    def _hand_over(
        self, lease: Lease, prefix: Prefix, takers: Sequence[Tier], num_bytes: int
    ) -> bool:
        """Begin to keep a lease in these tiers; false if the copy to make it from was damaged."""
        assert self._snapshot is not None, "tiers come with a snapshot"
        if lease.blocks:
            payload = self._snapshot(lease.blocks, lease.num_tokens)
        elif (found := self.load(lease.key, lease.num_tokens)) is not None:
            payload, _, _ = found
        else:
            return False
        stored = self._stored.get(lease.key)
        if stored is None:
            stored = _Stored(stored_prefix(lease, prefix), num_bytes, [])
            self._add(stored)
        for tier in takers:
            stored.saving.append(tier)
            tier.save(stored.prefix, payload, num_bytes=num_bytes, deadline_ms=lease.deadline_ms)
        return True

    def _is_worth(self, tier: Tier, lease: Lease, num_bytes: int) -> bool:
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
        """Whether the stored prefix is the chain's own, whole somewhere, and worth reading."""
        prefix = stored.prefix
        if not stored.tiers or prefix.num_tokens > num_tokens:
            return False
        if prefix.owner != owner_of(chain.namespace):
            return False
        if prefix.tokens != chain.packed(0, prefix.num_tokens):
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
