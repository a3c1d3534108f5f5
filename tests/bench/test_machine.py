"""Whose processor time is foreign: not this process's, and not that of a measured server."""

import os
import socket

from bench.machine import listeners


def test_a_measured_server_is_found_by_the_port_that_it_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert listeners([port]) == {os.getpid()}

    assert listeners([port]) == set()
    assert listeners([]) == set()
