"""Judges replies to the requests of the fuzzer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.server.resilience.fuzzing.case import Case
from tests.server.resilience.fuzzing.wire import Reply

# Text in a reply that would reveal the server's internals.
_TELLTALE = ("Traceback", 'File "', "site-packages", ".py:", "/tmp/", "/dev/shm", sys.prefix)

GOOD = ("error", "valid", "closed")


class Judge:
    """Classifies replies into outcomes; those not in `GOOD` are failures."""

    def __init__(self, secrets: Iterable[Path]) -> None:
        """`secrets` are paths that must not appear in a reply."""
        self._secrets = (*_TELLTALE, *map(str, secrets))

    def __call__(self, case: Case, reply: Reply) -> str:
        """Return the outcome.

        `error`: with a message. `valid`: valid, be it by chance, and answered. `closed`: not a
        request, and not answered. Other outcomes describe the problem.
        """
        if reply.refused:
            return "GONE"
        if reply.hung:
            return "HUNG"
        if self._leaks(case, reply.text):
            return "LEAKS"
        if reply.error is not None:
            if "internal error" in reply.error:
                return "INTERNAL"
            if case.must_succeed and "Maximum queue size" not in reply.error:
                return "REFUSED"
            return "error" if reply.error.strip() else "NO MESSAGE"
        if reply.answered:
            return "ACCEPTED" if case.must_fail else "valid"
        return "closed" if case.may_close else "NO REPLY"

    def _leaks(self, case: Case, text: str) -> bool:
        """Whether `text` reveals something that the request itself did not contain."""
        return any(each in text and each.encode() not in case.payload for each in self._secrets)
