"""Ports: free ones are free, taken ones are seen."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from seatrial.runtime.servers import free_port, port_in_use


def test_a_free_port_can_be_bound() -> None:
    port = free_port()
    assert not port_in_use(port)
    with socket.create_server(("127.0.0.1", port)):
        assert port_in_use(port)


def test_no_port_twice_in_a_row() -> None:
    with ThreadPoolExecutor(4) as pool:
        ports = list(pool.map(lambda _: free_port(), range(200)))
    assert len(set(ports)) == 200


def test_a_server_on_all_addresses_counts() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert port_in_use(server.getsockname()[1])


def test_no_port_number() -> None:
    with pytest.raises(OverflowError):
        port_in_use(70_000)
