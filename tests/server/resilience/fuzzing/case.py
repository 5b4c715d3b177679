"""One request of the fuzzer, determined by a seed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A request that is, or may be, invalid, or valid at the borders of what is allowed.

    Attributes:
        kind: what is wrong or special with it, in a few words.
        transport: `stream` or `unary` (gRPC), or `http`.
        payload: the message, without gRPC's framing; for HTTP, all bytes of the connection.
        must_fail: False if the request may be valid by chance.
        must_succeed: whether it is valid, and nothing but a full queue may refuse it.
        cancel_after: responses after which the client of a `stream` leaves; None: it stays.
        may_close: whether the server may close the connection without a reply, since it cannot even
            parse the request.
        metadata: gRPC headers.
    """

    kind: str
    transport: str
    payload: bytes
    must_fail: bool = True
    may_close: bool = False
    must_succeed: bool = False
    cancel_after: int | None = None
    metadata: tuple[tuple[str, str | bytes], ...] = ()
