"""Rank: the order of sequences; smaller runs earlier."""

from __future__ import annotations

from engine.core.request import Request

# Priority, then arrival, for uids grow with it: a preempted sequence resumes before later ones.
Rank = tuple[int, int, int]


def rank_fcfs(request: Request) -> Rank:
    """Rank by arrival alone."""
    return 0, request.uid, request.index


def rank_by_priority(request: Request) -> Rank:
    """Rank by the priority that the client gave, then by arrival."""
    return request.priority, request.uid, request.index
