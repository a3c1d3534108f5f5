"""Connections are bounded, and one that serves a request is never closed for a new one."""

import pytest

from gateway.http.addresses import network_of
from gateway.http.connection_limits import ConnectionLimits


class Open:
    """A connection that only says whether it was closed."""

    def __init__(self, network: str = "here") -> None:
        self.network = network
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_an_address_has_so_many_and_another_one_its_own() -> None:
    counts = ConnectionLimits(max_total=10, max_per_address=1)
    first = Open()

    assert counts.admit(first)
    assert not counts.admit(Open())
    assert counts.admit(Open("there"))

    counts.remove(first)
    assert counts.admit(Open())


def test_the_one_that_is_idle_longest_makes_room() -> None:
    counts = ConnectionLimits(max_total=3, max_per_address=10)
    busy, idle, young = Open(), Open(), Open()
    for connection in (busy, idle, young):
        counts.admit(connection)
    counts.set_busy(busy)

    assert counts.admit(Open("new"))

    assert (busy.is_aborted, idle.is_aborted, young.is_aborted) == (False, True, False)
    assert counts.total == 3


def test_a_connection_that_was_used_is_idle_only_since_then() -> None:
    counts = ConnectionLimits(max_total=2, max_per_address=10)
    used, unused = Open(), Open()
    for connection in (used, unused):
        counts.admit(connection)
    counts.set_busy(used)
    counts.set_idle(used)

    counts.admit(Open())

    assert unused.is_aborted


def test_where_all_serve_requests_a_new_one_is_closed() -> None:
    counts = ConnectionLimits(max_total=1, max_per_address=10)
    busy = Open()
    counts.admit(busy)
    counts.set_busy(busy)

    assert not counts.admit(Open())
    assert (busy.is_aborted, counts.total) == (False, 1)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("", ""),
    ],
)
def test_a_client_is_an_address_or_an_ipv6_network(address: str, network: str) -> None:
    assert network_of(address) == network
