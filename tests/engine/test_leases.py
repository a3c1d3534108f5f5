from dataclasses import replace

import numpy as np
import pytest

from engine.blocks.pool import BlockPool
from engine.blocks.prefix_index import TOKEN_DTYPE, PrefixChain, PrefixIndex
from engine.leases.leases import Leases
from engine.protocol import Breakpoint
from engine.tiers.lease_store import LeaseStore
from tests.engine.oracle import small_config


class Book:
    """A lease book and one request of twelve blocks, of which the first `num_matched` matched."""

    def __init__(self, *, num_matched: int = 0, **changes: object) -> None:
        self.config = small_config(**changes)
        self.pool = BlockPool(self.config.num_blocks, PrefixIndex(4))
        self.leases = Leases(self.config, self.pool, LeaseStore())
        self.table = [self.pool.allocate() for _ in range(12)]
        self.matched = self.table[:num_matched]
        self.chain = PrefixChain(b"tenant", np.arange(48, dtype=TOKEN_DTYPE), 4)

    def answer(self, reservation, tokens: int, deadline_ms: int = 100, chain=None):
        grant = self.leases.decide(
            Breakpoint(tokens, 0, write=True),
            (chain or self.chain).at(tokens),
            reservation,
            matched=self.matched,
            deadline_ms=deadline_ms,
        )
        self.check()
        return grant.outcome, grant.reason

    def commit(self, reservation, tokens: int, deadline_ms: int = 100) -> None:
        self.leases.commit(
            reservation,
            self.chain.at(tokens),
            num_tokens=tokens,
            table=self.table,
            deadline_ms=deadline_ms,
        )
        self.check()

    def check(self) -> None:
        self.leases.check_integrity()
        refs = [int(block in self.table) for block in range(self.config.num_blocks)]
        self.pool.check_integrity(refs, self.leases.pins())


def test_a_reservation_pins_matched_blocks_at_once_and_counts_the_rest() -> None:
    book = Book(num_matched=2)
    reservation = book.leases.reserve(b"tenant")

    assert book.answer(reservation, 17) == ("granted", None)

    assert (book.pool.num_pinned, book.leases.num_held) == (2, 5)


def test_nested_breakpoints_are_counted_once() -> None:
    book = Book(num_matched=1, pin_cap_blocks=6)
    reservation = book.leases.reserve(b"tenant")

    answers = [book.answer(reservation, tokens) for tokens in (6, 7, 13, 24)]

    assert answers == [("granted", None)] * 4
    assert book.leases.num_held == 6
    for tokens in (6, 7, 13, 24):
        book.commit(reservation, tokens)
    assert (book.leases.num_live, book.leases.num_held, book.pool.num_pinned) == (4, 6, 6)


def test_a_commit_turns_counted_blocks_into_pinned_ones() -> None:
    book = Book()
    reservation = book.leases.reserve(b"tenant")
    book.answer(reservation, 8)

    book.commit(reservation, 8)

    assert (book.pool.num_pinned, book.leases.num_held, book.leases.num_live) == (2, 2, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"namespace_quota_blocks": 2}, "quota"),
        ({"pin_cap_blocks": 2}, "capacity"),
        ({"pin_cap_blocks": 2, "namespace_quota_blocks": 2}, "quota"),
        ({"min_lease_tokens": 13}, "too_short"),
        ({"enable_prefix_caching": False}, "caching_disabled"),
    ],
)
def test_a_refusal_names_its_reason_and_holds_nothing(changes, reason) -> None:
    book = Book(**changes)
    reservation = book.leases.reserve(b"tenant")

    assert book.answer(reservation, 12) == ("refused", reason)

    assert book.leases.num_held == 0


def test_the_longest_breakpoint_that_fits_is_granted() -> None:
    book = Book(pin_cap_blocks=3)
    reservation = book.leases.reserve(b"tenant")

    outcomes = [book.answer(reservation, tokens)[0] for tokens in (8, 12, 16)]

    assert outcomes == ["granted", "granted", "refused"]


def test_one_namespace_at_its_quota_leaves_room_for_another() -> None:
    book = Book(namespace_quota_blocks=2, pin_cap_blocks=4)
    assert book.answer(book.leases.reserve(b"tenant"), 8)[0] == "granted"
    assert book.answer(book.leases.reserve(b"tenant"), 8) == ("refused", "quota")

    other = PrefixChain(b"other", np.arange(48, dtype=TOKEN_DTYPE), 4)

    assert book.answer(book.leases.reserve(b"other"), 8, chain=other)[0] == "granted"
    assert book.answer(book.leases.reserve(b"third"), 8) == ("refused", "capacity")


def test_a_cancelled_reservation_gives_everything_back_once() -> None:
    book = Book(num_matched=2)
    reservation = book.leases.reserve(b"tenant")
    book.answer(reservation, 17)

    book.leases.cancel(reservation)
    book.leases.cancel(reservation)

    book.check()
    assert (book.leases.num_held, book.pool.num_pinned) == (0, 0)


def test_asking_again_refreshes_and_never_shortens() -> None:
    book = Book()
    reservation = book.leases.reserve(b"tenant")
    book.answer(reservation, 8)
    book.commit(reservation, 8, deadline_ms=100)

    assert book.answer(book.leases.reserve(b"tenant"), 8, deadline_ms=300)[0] == "refreshed"
    assert book.answer(book.leases.reserve(b"tenant"), 8, deadline_ms=200)[0] == "refreshed"

    assert book.leases.next_expiry_ms() == 300
    book.leases.expire(299)
    assert book.leases.num_live == 1
    book.leases.expire(300)
    assert (book.leases.num_live, book.leases.num_held) == (0, 0)
    assert book.leases.next_expiry_ms() is None


def test_the_second_of_two_commits_refreshes_and_releases_its_reservation() -> None:
    book = Book()
    first, second = book.leases.reserve(b"tenant"), book.leases.reserve(b"tenant")
    assert [book.answer(r, 8)[0] for r in (first, second)] == ["granted", "granted"]
    assert book.leases.num_held == 4

    book.commit(first, 8, deadline_ms=100)
    book.commit(second, 8, deadline_ms=200)

    assert (book.leases.num_live, book.leases.num_held) == (1, 2)
    assert book.leases.next_expiry_ms() == 200


def test_an_expiry_between_nested_commits_breaks_no_cap() -> None:
    book = Book(pin_cap_blocks=4)
    reservation = book.leases.reserve(b"tenant")
    for tokens in (6, 16):
        book.answer(reservation, tokens)
    book.commit(reservation, 6, deadline_ms=10)
    book.leases.expire(10)
    book.check()
    assert book.answer(book.leases.reserve(b"other"), 4) == ("refused", "capacity")

    book.commit(reservation, 16)

    assert (book.leases.num_live, book.leases.num_held) == (1, 4)


def test_another_leases_expiry_leaves_reserved_blocks_pinned() -> None:
    book = Book(num_matched=2)
    old = book.leases.reserve(b"tenant")
    book.answer(old, 8)
    book.commit(old, 8, deadline_ms=10)
    new = book.leases.reserve(b"tenant")
    book.answer(new, 16)

    book.leases.expire(10)

    book.check()
    assert book.pool.num_pinned == 2


def test_the_pin_cap_must_leave_blocks_for_a_request() -> None:
    config = small_config()
    assert config.max_request_tokens == 80
    assert replace(config, pin_cap_blocks=20).max_request_tokens == 48
