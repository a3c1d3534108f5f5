"""A synchronous tier of the oracle's slots, as slow, as full and as unreliable as a test wants."""

import random

from engine.lease_types import StoredPrefix
from engine.tiers.lease_store import LeaseStore
from engine.tiers.tier import Costs, Recovered

ALWAYS_PAYS = Costs(prefill_tokens=1.0, tier_bytes={"host": 1e18, "disk": 1e18})


class SlotTier:
    """Keeps payloads as they are. By default it is fast, large and whole.

    `chance` makes saves end later or fail, and loads find a damaged copy, now and then.
    """

    def __init__(
        self,
        name: str = "disk",
        *,
        keeps_all: bool = False,
        budget_bytes: int = 1 << 30,
        chance: random.Random | None = None,
    ) -> None:
        self.name, self.keeps_all = name, keeps_all
        self.budget_bytes = budget_bytes
        self.chance = chance
        self.kept: dict[bytes, tuple[StoredPrefix, object, int, int]] = {}
        self.saving: list[bytes] = []
        self.whole: set[bytes] = set()
        self.num_saves = self.num_loads = 0

    def recover(self) -> list[Recovered]:
        """Another engine takes over what is whole; what was being saved is gone."""
        self.kept = {key: kept for key, kept in self.kept.items() if key in self.whole}
        self.saving = []
        return [Recovered(stored, due, size) for stored, _, size, due in self.kept.values()]

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(size for _, _, size, _ in self.kept.values())

    def accepts(self, num_bytes: int) -> bool:
        return True

    def save(self, stored, payload, *, num_bytes, deadline_ms) -> None:
        assert stored.key not in self.kept, "saved twice"
        self.kept[stored.key] = stored, payload, num_bytes, deadline_ms
        self.saving.append(stored.key)
        self.num_saves += 1

    def poll(self) -> list[tuple[bytes, bool]]:
        ended = []
        for key in [key for key in self.saving if self._happens(0.3, otherwise=True)]:
            self.saving.remove(key)
            is_saved = not self._happens(0.1, otherwise=False)
            self.whole |= {key} if is_saved else set()
            if not is_saved:
                del self.kept[key]
            ended.append((key, is_saved))
        return ended

    def load(self, key: bytes):
        assert key in self.whole, "loaded before it was whole"
        if self._happens(0.1, otherwise=False):
            return None
        self.num_loads += 1
        return self.kept[key][1]

    def extend(self, key: bytes, deadline_ms: int) -> None:
        if key in self.kept:
            self.kept[key] = (*self.kept[key][:3], deadline_ms)

    def drop(self, key: bytes) -> None:
        self.kept.pop(key, None)
        self.whole.discard(key)
        if key in self.saving:
            self.saving.remove(key)

    def sync(self) -> None:
        """Nothing to do: memory does not outlive a power cut."""

    def stats(self) -> dict[str, float]:
        return {}

    def _happens(self, probability: float, *, otherwise: bool) -> bool:
        return self.chance.random() < probability if self.chance else otherwise


def slot_store(runner, *tiers: SlotTier, costs: Costs = ALWAYS_PAYS) -> LeaseStore:
    """A store over such tiers, in which a block takes one byte."""
    return LeaseStore(tiers, costs=costs, snapshot=runner.snapshot, block_size=runner.block_size)
