"""The table of live leases: what has ended takes no memory, however far its deadline was."""

import gc

from engine.lease_types import Lease
from engine.leases.lease_table import LeaseTable

HOUR_MS = 3_600_000


def lease(number: int, *, deadline_ms: int = HOUR_MS) -> Lease:
    name = f"boot:{number}"
    return Lease(
        id=name, number=number, request_id="req", owner=b"owner", key=name.encode(),
        num_tokens=16, blocks=(number,), deadline_ms=deadline_ms, persist=False,
    )  # fmt: skip


def count_in_memory() -> int:
    gc.collect()
    return sum(type(each) is Lease for each in gc.get_objects())


def test_leases_that_end_early_are_forgotten() -> None:
    table, num_before = LeaseTable(), count_in_memory()
    for number in range(2_000):
        ended = lease(number)
        table.add(ended)
        table.remove(ended)
    del ended

    assert count_in_memory() - num_before <= 64


def test_the_next_due_is_found_after_many_have_ended_early() -> None:
    table = LeaseTable()
    leases = [lease(number, deadline_ms=HOUR_MS - number) for number in range(1_000)]
    for each in leases:
        table.add(each)
    for each in leases[100:]:
        table.remove(each)

    assert table.next_due() is leases[99]
    table.check_integrity()
