"""Ports: free ones, and errors for those that are taken."""

import socket

import pytest

from engine.launch.errors import ServerStartError
from engine.launch.ports import Endpoint, pick_free, require_free


def test_free_ports_differ() -> None:
    assert len(set(pick_free(3))) == 3
    require_free([Endpoint(str(port), "0.0.0.0", port) for port in pick_free(3)])


def test_a_free_port_is_not_one_that_is_promised_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens there yet: the system may offer it."""
    offered = iter([5001, 5002, 5003])

    class Offered(socket.socket):
        def bind(self, _: object) -> None:
            self.port = next(offered)

        def getsockname(self) -> tuple[str, int]:
            return "0.0.0.0", self.port

    monkeypatch.setattr(socket, "socket", Offered)
    assert pick_free(1, taken=[5001, 5003]) == (5002,)


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_taken_port_names_its_flag(address: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} .grpc. is in use") as caught:
            require_free([Endpoint("grpc", address, port)])
    assert "--grpc-port" in caught.value.hint


def test_one_port_for_two() -> None:
    (port,) = pick_free(1)
    with pytest.raises(ServerStartError, match="both --http-port and --grpc-port"):
        require_free([Endpoint(name, "0.0.0.0", port) for name in ("http", "grpc")])


def test_address_of_another_machine() -> None:
    with pytest.raises(ServerStartError, match=r"192\.0\.2\.1"):
        require_free([Endpoint("http", "192.0.2.1", pick_free(1)[0])])


def test_url() -> None:
    assert Endpoint("http", "0.0.0.0", 1).url == "localhost:1"
    assert Endpoint("http", "10.0.0.1", 1).url == "10.0.0.1:1"
    assert Endpoint("http", "::1", 1).url == "[::1]:1"
