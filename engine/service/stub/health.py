"""Health: what can be said of the engine at this moment."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "ready", "restarting", "closed"]


class Health(msgspec.Struct, frozen=True):
    """The answer to a health request, as JSON.

    Attributes:
        state: only `ready` takes requests; `restarting` follows the death of the engine process.
        detail: one sentence, why it is not ready; empty if it is.
        num_restarts: how often the engine process has been started again.
        num_in_flight: requests that have been submitted and not yet finished.
    """

    state: State
    detail: str = ""
    num_restarts: int = 0
    num_in_flight: int = 0
