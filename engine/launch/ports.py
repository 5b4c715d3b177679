"""TCP ports of a server: which are free, and a clear error for one that is not."""

import errno
import socket
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from engine.launch.errors import ServerStartError


@dataclass(frozen=True)
class Endpoint:
    """One service of tritonserver: `name` is `http`, `grpc` or `metrics` as in its flags."""

    name: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """The host name by which a client on this machine reaches it."""
        return "localhost" if self.address in ("127.0.0.1", "0.0.0.0", "::") else self.address

    @property
    def url(self) -> str:
        """`host:port` for a client on this machine."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def pick_free(count: int, *, taken: Collection[int] = ()) -> tuple[int, ...]:
    """Return `count` different ports, none of `taken`, that nothing listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count + len(taken))]
        for each in sockets:
            each.bind(("", 0))
        ports = [each.getsockname()[1] for each in sockets]
        return tuple(port for port in ports if port not in taken)[:count]


def require_free(endpoints: Iterable[Endpoint]) -> None:
    """Check that a server could listen on each endpoint.

    Raises:
        ServerStartError: naming the port that cannot be had and the flag that changes it.
    """
    seen: dict[int, str] = {}
    for endpoint in endpoints:
        flag = f"--{endpoint.name}-port"
        if endpoint.port in seen:
            raise ServerStartError(
                f"port {endpoint.port} is given to both {seen[endpoint.port]} and {flag}",
                f"set one of them to another port; {seen[endpoint.port]} 0 takes a free one",
            )
        seen[endpoint.port] = flag
        _listen_once(endpoint, flag)


def _listen_once(endpoint: Endpoint, flag: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            endpoint.address, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As a server does: connections of an earlier one in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerStartError(
                f"port {endpoint.port} ({endpoint.name}) is in use by another program",
                f"stop that program, or choose another port with {flag}",
            ) from None
        raise ServerStartError(
            f"cannot listen on {endpoint.address}:{endpoint.port} ({flag}): {error.strerror}"
        ) from None
