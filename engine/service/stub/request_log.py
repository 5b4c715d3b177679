"""The log of requests: one line for each that the engine stub has answered, and how it ended.

Never the text of a prompt or an output, nor their tokens.
"""

from __future__ import annotations

import logging
import time

from engine.errors import EngineDeadError, RequestCancelledError, TridentError, shown
from engine.protocol.messages import RequestStats
from engine.service.stub.stream import RequestStream

log = logging.getLogger("trident.request")


def log_refusal(request_id: str, error: Exception) -> None:
    """Log a request that never reached the engine process."""
    event = "request cancelled" if isinstance(error, RequestCancelledError) else "request refused"
    text = shown(str(error)) if isinstance(error, TridentError) else "internal error"
    fields = {"request_id": shown(request_id), "error": text}  # it may be refused for its id
    log.info(event, extra={"fields": fields})


def log_end(stream: RequestStream) -> None:
    """Log a request that has been answered."""
    reasons: str | None
    match stream.error:
        case None:
            event = "request finished"
            reasons = ",".join(reason for _, reason in sorted(stream.finish_reasons.items()))
        case RequestCancelledError():
            event, reasons = "request cancelled", "abort"
        case EngineDeadError():
            event, reasons = "request lost", "error"
        case _:
            event, reasons = "request refused", None
    fields = {
        "request_id": stream.request_id,
        "uid": stream.uid,
        "finish_reason": reasons,
        "prompt_tokens": stream.load.num_tokens,
        "output_tokens": stream.num_output_tokens,
        **_times(stream.arrival_time, stream.stats),
        "error": None if reasons == "abort" or not stream.error else shown(str(stream.error)),
    }
    log.info(event, extra={"fields": fields})


def _times(arrival_time: float, sequences: list[RequestStats]) -> dict[str, float | int]:
    """Return the times measured by the engine, over the sequences that have finished.

    Without any, only the time since arrival.
    """
    if not sequences:
        return {"e2e_s": round(time.monotonic() - arrival_time, 6)}
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
