"""Defers a waiting prompt while a running sequence computes a prefix that it can reuse.

    leader     [ committed | next block | ............. ]   running, computes its prompt
    follower   [ matched   | next block | .... | own .. ]   waits, and then reads what it shares

A leader is found by the key of its next uncommitted block: one dictionary access, however many
sequences run. A follower holds no blocks while it waits, and waits for a limited time, since
computing a prefix twice is correct, only slower.
"""

from bisect import bisect_left
from collections.abc import Iterable

from engine.config import EngineConfig
from engine.scheduling.sequence import Deferral, Sequence


class PendingPrefixes:
    """The running sequences that still compute full blocks of their prompts, by the next block."""

    def __init__(self, config: EngineConfig, *, is_on: bool) -> None:
        """Start empty; when not on, no sequence ever leads."""
        self._config = config
        self._is_on = is_on and config.enable_prefix_caching
        self._leaders: dict[bytes, Sequence] = {}
        self._next_keys: dict[Sequence, bytes] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence may be a leader."""
        return sequence in self._next_keys

    def advance(self, leader: Sequence) -> None:
        """Register a running sequence under the next block of its prompt, if there is one."""
        self.leave(leader)
        size = self._config.block_size
        end = (leader.num_computed // size + 1) * size
        if self._is_on and end <= leader.num_prompt:
            key = self._next_keys[leader] = leader.chain.at(end).key
            self._leaders.setdefault(key, leader)

    def leave(self, leader: Sequence) -> None:
        """Remove a sequence. Idempotent."""
        key = self._next_keys.pop(leader, None)
        if key is not None and self._leaders.get(key) is leader:
            del self._leaders[key]

    def defer(self, follower: Sequence, num_matched: int, now_ms: int) -> bool:
        """Defer a sequence that matches `num_matched` tokens; returns false if it should start."""
        until_ms = now_ms + self._config.max_defer_ms
        if follower.deferral is not None:
            until_ms = follower.deferral.until_ms
        leader = self._leader_of(follower, num_matched)
        if leader is None or now_ms >= until_ms:
            return False
        num_shared = self._count_shared(leader, follower)
        # All that the leader computes for both counts, even if it is computed already, so that a
        # follower that arrives a step later waits for the rest too.
        if num_shared - leader.num_reused < self._config.min_shared_tokens:
            return False
        follower.deferral = Deferral(leader, num_shared, until_ms)
        return True

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that every leader is running."""
        assert set(self._next_keys) <= set(running), "a leader does not run"
        assert set(self._leaders.values()) <= set(self._next_keys), "a leader without its key"

    def _leader_of(self, follower: Sequence, num_matched: int) -> Sequence | None:
        size = self._config.block_size
        end = (num_matched // size + 1) * size
        if end > follower.num_prompt:
            return None
        return self._leaders.get(follower.chain.at(end).key)

    def _count_shared(self, leader: Sequence, follower: Sequence) -> int:
        """Return how many of the follower's first tokens the leader will commit."""
        size = self._config.block_size
        num_shortest = min(leader.num_prompt, follower.num_prompt)

        def differ(num_blocks: int) -> bool:
            ours, theirs = follower.chain.at(num_blocks * size), leader.chain.at(num_blocks * size)
            return ours.key != theirs.key

        # A key covers everything before it, so the first one that differs is found by bisection.
        num_blocks = bisect_left(range(1, num_shortest // size + 1), True, key=differ)
        num_shared = num_blocks * size
        for grant in leader.grants:
            # A breakpoint's tail is committed too.
            is_tail = grant.outcome == "granted" and num_shared < grant.num_tokens <= num_shortest
            if (
                is_tail
                and follower.chain.at(grant.num_tokens).key == leader.chain.at(grant.num_tokens).key
            ):
                num_shared = grant.num_tokens
        return num_shared
