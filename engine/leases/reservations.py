"""Reservations: blocks held for granted leases whose prefixes are still being computed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from engine.blocks.pool import BlockPool
from engine.config import EngineConfig
from engine.lease_types import Reservation
from engine.leases.holdings import Holdings


class Reservations:
    """Every open reservation of one engine."""

    def __init__(self, config: EngineConfig, pool: BlockPool, holdings: Holdings) -> None:
        """Start empty."""
        self._config = config
        self._pool = pool
        self._holdings = holdings
        self._open: set[Reservation] = set()

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open)

    def open(self, owner: bytes, request_id: str) -> Reservation:
        """Open an empty reservation for one request."""
        reservation = Reservation(owner, request_id)
        self._open.add(reservation)
        return reservation

    def add(
        self,
        reservation: Reservation,
        num_tokens: int,
        matched: Sequence[int],
        *,
        make_room: Callable[[bytes | None, int, Sequence[int]], bool],
    ) -> Literal["quota", "capacity"] | None:
        """Hold the blocks of one more breakpoint; returns the limit that forbids it, if one does.

        Blocks in `matched` are pinned at once, the others only counted. `make_room` is called to
        reduce what one owner, or all of them, hold by some blocks without unpinning those in use
        here; it returns false, having changed nothing, when it cannot.
        """
        owner, num_blocks = reservation.owner, self._config.blocks_for(num_tokens)
        existing = matched[reservation.num_blocks : num_blocks]
        while True:
            num_pinned = sum(self._pool.is_pinned(block) for block in existing)
            num_new = num_blocks - reservation.num_blocks - num_pinned
            excess = self._holdings.excess(owner, num_new)
            if excess is None:
                break
            num_excess = self._holdings.num_excess(owner, num_new)
            if not make_room(owner if excess == "quota" else None, num_excess, existing):
                return excess
        for block in existing:
            self._holdings.pin(owner, block)
        reservation.blocks.extend(existing)
        reservation.num_tokens = len(reservation.blocks) * self._config.block_size
        num_counted = num_blocks - reservation.num_blocks - len(existing)
        self._holdings.count(owner, num_counted)
        reservation.num_blocks = num_blocks
        reservation.num_outstanding += 1
        return None

    def advance(self, reservation: Reservation, num_tokens: int, table: Sequence[int]) -> None:
        """Pin the blocks of a request's first `num_tokens` tokens, which are computed now."""
        num_blocks = self._config.blocks_for(num_tokens)
        for block in table[len(reservation.blocks) : num_blocks]:
            self._holdings.count(reservation.owner, -1)
            self._holdings.pin(reservation.owner, block)
            reservation.blocks.append(block)
        reservation.num_tokens = max(reservation.num_tokens, num_tokens)

    def settle_one(self, reservation: Reservation) -> None:
        """Count one breakpoint as leased; after the last one, free what is still held."""
        reservation.num_outstanding -= 1
        if reservation.num_outstanding == 0:
            self.cancel(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """Free all that the reservation holds. Idempotent."""
        if reservation not in self._open:
            return
        self._open.remove(reservation)
        num_counted = reservation.num_blocks - len(reservation.blocks)
        self._holdings.count(reservation.owner, -num_counted)
        for block in reversed(reservation.blocks):
            self._holdings.unpin(reservation.owner, block, cold=False)
        reservation.blocks.clear()
        reservation.num_blocks = reservation.num_tokens = 0
