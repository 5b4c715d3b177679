"""Quotas: how much of its limits each tenant has used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from client.gateway.errors import ApiError
from client.gateway.security.bucket import Bucket
from client.gateway.security.ledger import Ledger
from client.gateway.security.tenants import Tenant, Tenants


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
