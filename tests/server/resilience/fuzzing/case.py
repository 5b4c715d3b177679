"""One malformed request, made from a seed and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A request that is wrong, or may be.

    Attributes:
        kind: what is wrong with it, in a few words.
        transport: `stream` or `unary` (gRPC), or `http`.
        payload: the message, without gRPC's framing; of HTTP, all bytes of the connection.
        must_fail: False where chance may have left the request valid.
        may_close: whether the server may end the connection without a word, for it could not
            even read the request.
        metadata: gRPC headers.
    """

    kind: str
    transport: str
    payload: bytes
    must_fail: bool = True
    may_close: bool = False
    metadata: tuple[tuple[str, str | bytes], ...] = ()
