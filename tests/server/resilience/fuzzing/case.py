"""One malformed request, determined by a seed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A request that is, or may be, invalid.

    Attributes:
        kind: what is wrong with it, in a few words.
        transport: `stream` or `unary` (gRPC), or `http`.
        payload: the message, without gRPC's framing; for HTTP, all bytes of the connection.
        must_fail: False if the request may be valid by chance.
        may_close: whether the server may close the connection without a reply, since it cannot even
            parse the request.
        metadata: gRPC headers.
    """

    kind: str
    transport: str
    payload: bytes
    must_fail: bool = True
    may_close: bool = False
    metadata: tuple[tuple[str, str | bytes], ...] = ()
