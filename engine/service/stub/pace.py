"""Pace: how often a stream is answered, by what the stages behind the engine stub can carry."""

from __future__ import annotations

import os

# A response costs 0.6 to 0.7 ms of processor time over the server and the stages, however many
# tokens it carries. At these rates all of them take a third of each core, or most of it where the
# cores compute no model; what the engine produces meanwhile is coalesced. `trident bench stages`
# measures it.
_RESPONSES_PER_CORE_S = 500
_RESPONSES_PER_FREE_CORE_S = 1200
_MOST_RESPONSES_S = 4000  # that the one detokenizer keeps up with
_LEAST_RESPONSES_S = 100

_LEAST_INTERVAL_S = 0.004  # of one stream: 250 responses per second look as smooth as more
_MOST_INTERVAL_S = 1.0  # a token waits no longer, however many streams there are

_MOST_TRANSIT_S = 0.02  # from the stub to the detokenizer; longer, and messages wait in a queue
_SLOWER, _FASTER = 0.85, 1.1


class Pace:
    """The rate of responses of all streams together.

    It falls while messages wait before the detokenizer, in a queue of Triton's that has no limit:
    the stages are slower then, or other programs use the cores. Otherwise it rises to a limit, so
    that responses never take the processor from the engine. For any thread.
    """

    def __init__(self) -> None:
        self._limit = 0.0
        self.responses_per_s = 0.0
        self.set_limit(runs_on_host=True)

    def set_limit(self, *, runs_on_host: bool) -> None:
        """Begin at the limit; `runs_on_host` as in `engine.protocol.Ready`."""
        per_core = _RESPONSES_PER_CORE_S if runs_on_host else _RESPONSES_PER_FREE_CORE_S
        num_cores = len(os.sched_getaffinity(0))
        self.responses_per_s = self._limit = float(min(per_core * num_cores, _MOST_RESPONSES_S))

    def on_transit(self, least_s: float) -> None:
        """Take the least time that a message took to the detokenizer, over the last moments."""
        if least_s > _MOST_TRANSIT_S:
            self.responses_per_s = max(self.responses_per_s * _SLOWER, _LEAST_RESPONSES_S)
        else:
            self.responses_per_s = min(self.responses_per_s * _FASTER, self._limit)

    def interval_s(self, num_streams: int) -> float:
        """Return the time between two responses of one of `num_streams` streams."""
        return min(max(num_streams / self.responses_per_s, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)
