"""RequestLog: one line for each request that the engine stub has answered, and how it ended.

Never the text of a prompt or an output, nor their tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.errors import EngineDeadError, RequestCancelledError, TridentError
from engine.limits import shown
from engine.protocol import Chunk, RequestStats
from engine.service.stub.delivery import NewRequest, ResponseSink

log = logging.getLogger("trident.request")


class RequestLog:
    """Writes the lines; tells `on_refused` of each request that is answered by an error alone."""

    def __init__(self, on_refused: Callable[[Exception], None]) -> None:
        self._on_refused = on_refused

    def refused(self, request_id: str, error: Exception) -> None:
        """Log a request that never reached the engine process."""
        text = shown(str(error)) if isinstance(error, TridentError) else "internal error"
        fields = {"request_id": shown(request_id), "error": text}  # it may be refused for its id
        log.info("request refused", extra={"fields": fields})
        self._on_refused(error)

    def logged(self, uid: int, request: NewRequest, sink: ResponseSink) -> ResponseSink:
        """Return a sink that answers through `sink`, and logs how the request ended."""
        return _LoggedSink(uid, request, sink, self._on_refused)


class _LoggedSink:
    def __init__(
        self,
        uid: int,
        request: NewRequest,
        sink: ResponseSink,
        on_refused: Callable[[Exception], None],
    ) -> None:
        self._uid = uid
        self._request = request
        self._sink = sink
        self._on_refused = on_refused
        self._reasons: dict[int, str] = {}  # by index of the sequence
        self._stats: list[RequestStats] = []
        self._num_output_tokens = 0

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        for chunk in chunks:
            self._num_output_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._reasons[chunk.index] = chunk.finish_reason
            if chunk.stats is not None:
                self._stats.append(chunk.stats)
        if last:
            self._log("request finished", [self._reasons[i] for i in sorted(self._reasons)])
        self._sink.send(chunks, last=last)

    def fail(self, error: TridentError) -> None:
        match error:
            case RequestCancelledError():
                self._log("request cancelled", ["abort"])
            case EngineDeadError():
                self._log("request lost", ["error"], error)
            case _:
                self._log("request refused", [], error)
                self._on_refused(error)
        self._sink.fail(error)

    def _log(self, event: str, reasons: list[str], error: TridentError | None = None) -> None:
        fields = {
            "request_id": self._request.request_id,
            "uid": self._uid,
            "finish_reason": ",".join(reasons) or None,
            "prompt_tokens": len(self._request.prompt_token_ids),
            "output_tokens": self._num_output_tokens,
            **_times(self._request, self._stats),
            "error": None if error is None else shown(str(error)),
        }
        log.info(event, extra={"fields": fields})


def _times(request: NewRequest, sequences: list[RequestStats]) -> dict[str, float | int]:
    """Return the fields that only the engine knows: of the first sequence to get so far.

    Until one has ended there is but the time since arrival.
    """
    if not sequences:
        return {"e2e_s": round(time.monotonic() - request.arrival_time, 6)}
    first = min(sequences, key=lambda stats: stats.first_token_time)
    last = max(sequences, key=lambda stats: stats.finished_time)
    seconds = {
        "queue_s": first.first_scheduled_time - first.arrival_time,
        "ttft_s": first.first_token_time - first.arrival_time,
        "e2e_s": last.finished_time - last.arrival_time,
    }
    return {
        "cached_tokens": first.num_cached_tokens,
        **{name: round(value, 6) for name, value in seconds.items()},
    }
