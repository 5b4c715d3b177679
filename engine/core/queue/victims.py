"""Victims: which running sequence is preempted when others need its slot or its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from engine.core.queue.rank import Rank
from engine.core.queue.tenant_shares import TenantShares
from engine.core.request import Request


class Victims:
    """Chooses among the running sequences of the lowest priority.

    It is the last in rank of the tenant with most: with one tenant, the last of all.
    """

    def __init__(self, rank: Callable[[Request], Rank], shares: TenantShares) -> None:
        """Choose by `rank`, whose first number is the priority, and by `shares`."""
        self._rank = rank
        self._num_running = shares.num_running

    def first(self, running: Sequence[Request], wants: Request) -> Request:
        """Return who of the `running` sequences, in their order, gives its blocks to `wants`.

        None before it: they may have got some in the same step, which are copied into before it.
        """
        place = bisect_left(running, self._rank(wants), key=self._rank)
        return max(running[place:], key=self._key)

    def for_newcomer(self, head: Request, running: Sequence[Request]) -> Request | None:
        """Return the sequence that gives way to the next waiting one, which finds no room.

        None does unless `head` is of a tenant that has none running, and there is one with several;
        nor does one of higher priority, nor one for which others would have to wait, nor one that
        was bypassed so often that it is overdue: it would be preempted again and again.
        """
        num_running = self._num_running
        if num_running[head.tenant]:
            return None
        several = (
            each
            for each in running
            if num_running[each.tenant] > 1 and not (each.is_awaited or each.is_overdue)
        )
        victim = max(several, key=self._key, default=None)
        if victim is None or self._rank(victim)[0] < self._rank(head)[0]:
            return None
        return victim

    def _key(self, request: Request) -> tuple[int, int, Rank]:
        rank = self._rank(request)
        return rank[0], self._num_running[request.tenant], rank
