"""Quotas: how much of its limits each tenant has used."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from client.gateway.errors import ApiError
from client.gateway.security.tenants import Tenant, Tenants

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # of the times: who has waited as long as was said is not sent away again

_NUMBER_BYTES = 8


class Ledger:
    """Numbers in memory; with a file, those of every process that has opened it.

        with ledger as numbers:
            numbers[0] += 1

    Nobody else is in the block meanwhile. A process that is killed there lets the next one in: the
    lock is the kernel's.
    """

    def __init__(self, size: int, file: Path | None = None) -> None:
        """Open `size` numbers; they are 0 at first."""
        length = max(size, 1) * _NUMBER_BYTES
        self._lock = None if file is None else os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if self._lock is not None:
            os.ftruncate(self._lock, length)
        memory = mmap.mmap(-1 if self._lock is None else self._lock, length)
        self._numbers: memoryview[float] = memoryview(memory).cast("d")

    def __enter__(self) -> memoryview[float]:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._numbers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Bucket:
    """A token bucket that holds a minute's use, and is full at the beginning.

    It is kept as the time at which it will be full again: the generic cell rate algorithm (ITU-T
    I.371).
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
        index: int = 0,
    ) -> None:
        """Make a bucket.

        Args:
            per_minute: what it holds.
            clock: returns seconds; the same for all who share the ledger.
            ledger: has that time at `index`; None is one of its own.
        """
        self.per_minute = per_minute
        self._clock = clock
        self._ledger = ledger or Ledger(1)
        self._index = index

    def take(self, amount: int) -> float:
        """Take `amount` out if it is there, and return 0; else return the seconds until it is.

        An amount of 0 is there as long as nothing is owed.
        """
        with self._ledger as times:
            now = self._clock()
            full_at = self._after(amount, times[self._index], now)
            wait = full_at - now - _MINUTE_S
            if wait > _ROUNDING_S:
                return wait
            times[self._index] = full_at
            return 0.0

    def charge(self, amount: int) -> None:
        """Take `amount` out, owing what is not there."""
        with self._ledger as times:
            times[self._index] = self._after(amount, times[self._index], self._clock())

    def _after(self, amount: int, full_at: float, now: float) -> float:
        return max(full_at, now) + amount * _MINUTE_S / self.per_minute


class Quotas:
    """Tenants, held to their requests and tokens per minute.

    The tokens of an answer are known when it is there: a tenant whose last answers were longer than
    what it had left waits until that is paid.

    Attributes:
        tenants: all there are.
    """

    def __init__(
        self,
        tenants: Tenants,
        clock: Callable[[], float] = time.monotonic,
        file: Path | None = None,
    ) -> None:
        """Take the tenants.

        Args:
            tenants: all there are.
            clock: returns seconds.
            file: shared by all who hold these tenants to their limits together; None: nobody else.
        """
        self.tenants = tenants
        ledger = Ledger(2 * len(tenants.all), file)
        self._requests, self._tokens = dict[Tenant, Bucket](), dict[Tenant, Bucket]()
        for number, tenant in enumerate(tenants.all):
            if (limit := tenant.requests_per_minute) is not None:
                self._requests[tenant] = Bucket(limit, clock, ledger, 2 * number)
            if (limit := tenant.tokens_per_minute) is not None:
                self._tokens[tenant] = Bucket(limit, clock, ledger, 2 * number + 1)

    def admit(self, tenant: Tenant) -> None:
        """Count a request of a tenant.

        Raises:
            ApiError: it has to wait: 429.
        """
        _take(self._tokens.get(tenant), 0, "tokens")
        _take(self._requests.get(tenant), 1, "requests")

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        if (bucket := self._tokens.get(tenant)) is not None:
            bucket.charge(num_tokens)


def _take(bucket: Bucket | None, amount: int, what: str) -> None:
    if bucket is not None and (wait := bucket.take(amount)) > 0:
        after = math.ceil(wait)
        limit = f"{bucket.per_minute} {what} per minute"
        raise ApiError(
            f"the limit of {limit} is reached; try again in {after} s",
            code="rate_limit_exceeded",
            retry_after=after,
        )
