"""Progress of loading, as a bounded number of log lines."""

from __future__ import annotations

from collections.abc import Callable


def in_tenths(report: Callable[[str], None], sentence: str) -> Callable[[int, int], None]:
    """Return a function of (done, total) that reports `sentence` at each tenth.

    In `sentence`, {done} and {total} stand for the numbers, {share} for the percentage and {mib}
    for the total as bytes in MiB.
    """
    reached = 0

    def advance(done: int, total: int) -> None:
        nonlocal reached
        tenth = 10 * done // max(total, 1)
        if tenth > reached:
            reached = tenth
            figures = {"done": done, "total": total, "share": 10 * tenth, "mib": total / 2**20}
            report(sentence.format(**figures))

    return advance
