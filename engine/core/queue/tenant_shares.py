"""TenantShares: fair sharing of the engine's slots among tenants."""

from __future__ import annotations

from collections import Counter

_MAX_REMEMBERED = 4096  # tenants of whom none runs


class TenantShares:
    """Counts the running sequences of each tenant, and knows whose turn was longest ago.

    Attributes:
        num_running: sequences by tenant, of those that have any.
        changed: tenants whose share has changed since the waiting queues have read it.
    """

    def __init__(self) -> None:
        self.num_running: Counter[str] = Counter()
        self.changed: set[str] = set()
        self._turns: dict[str, int] = {}  # when each was last given a slot, in that order
        self._last_turn = 0

    def begin(self, tenant: str) -> None:
        """Count a sequence that has been given a slot."""
        self.num_running[tenant] += 1
        self._last_turn += 1
        self._turns.pop(tenant, None)
        self._turns[tenant] = self._last_turn
        self.changed.add(tenant)
        if len(self._turns) > _MAX_REMEMBERED:
            forgotten = next(iter(self._turns))
            del self._turns[forgotten]
            self.changed.add(forgotten)

    def end(self, tenant: str) -> None:
        """Count a sequence that has given its slot back."""
        self.num_running[tenant] -= 1
        if not self.num_running[tenant]:
            del self.num_running[tenant]
        self.changed.add(tenant)

    def of(self, tenant: str) -> tuple[int, int]:
        """Return what the tenant has: who has less is next. Running sequences, then its turn."""
        return self.num_running[tenant], self._turns.get(tenant, 0)
