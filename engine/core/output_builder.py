"""OutputBuilder: from the tokens of the sequences to what is handed out to their clients."""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.core.request import Request
from engine.protocol import RequestStats, SequenceOutput
from engine.text.detokenizer import Detokenizer

_WINDOW_PER_TOKEN = 32  # tokens of context that a chunk may carry for each new one
_MAX_WINDOW = 16  # tokens that a window may have before it is worth to look for a shorter one


class OutputBuilder:
    """Releases tokens in chunks, each with the window that stands for those before it."""

    def __init__(self, detokenizer: Detokenizer, *, stream_interval: int) -> None:
        """Build chunks of `stream_interval` tokens; the first has one, the last what is left."""
        self._detokenizer = detokenizer
        self._stream_interval = stream_interval

    def build(self, requests: Iterable[Request]) -> list[SequenceOutput]:
        """Return what the clients of `requests` may have now; the end of a sequence always.

        Text that a stop string holds back may turn a finish reason into "stop" with that.
        """
        return [
            self._release(request, end)
            for request in requests
            if (end := request.num_releasable_tokens) - request.output.num_released_tokens
            >= self._interval(request)
            or request.finish_reason is not None
        ]

    def _interval(self, request: Request) -> int:
        """Return how many tokens a chunk must have."""
        if request.output.num_released_tokens == 0:
            return 1  # the first token is never kept waiting
        # A window becomes long only while there is no text to send, and each chunk carries it.
        return max(self._stream_interval, len(request.output.window_ids) // _WINDOW_PER_TOKEN)

    def _release(self, request: Request, end: int) -> SequenceOutput:
        start, request.output.num_released_tokens = request.output.num_released_tokens, end
        begin = request.num_prompt_tokens + start
        new_ids = request.token_ids[begin : request.num_prompt_tokens + end]
        window_ids = request.output.window_ids
        request.output.window_ids = self._next_window(request, new_ids)
        finished = request.finish_reason is not None
        text_cut = self._text_cut(request, window_ids, new_ids) if finished else 0
        with_logprobs = request.sampling_params.logprobs is not None
        logprobs = request.output.logprobs
        if with_logprobs:
            logprobs, request.output.logprobs = logprobs[: end - start], logprobs[end - start :]
        return SequenceOutput(
            uid=request.uid,
            index=request.index,
            token_ids=new_ids,
            window_ids=window_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            text_cut=text_cut,
            logprobs=logprobs if with_logprobs else None,
            cumulative_logprob=request.output.cumulative_logprob if with_logprobs else None,
            stats=_stats(request) if finished else None,
        )

    def _next_window(self, request: Request, new_ids: list[int]) -> list[int]:
        """Return what stands for all tokens up to `new_ids`: any window does, if it is not long."""
        window_ids = request.output.window_ids
        if len(window_ids) + len(new_ids) <= _MAX_WINDOW:
            return window_ids + new_ids
        return self._detokenizer.next_window(
            window_ids, new_ids, skip_special_tokens=request.sampling_params.skip_special_tokens
        )

    def _text_cut(self, request: Request, window_ids: list[int], new_ids: list[int]) -> int:
        """Return the characters at the end of the final text that belong to what stopped it."""
        params = request.sampling_params
        text_cut = request.end_text()
        if not isinstance(request.stop_reason, int) or params.include_stop_str_in_output:
            return text_cut
        if (
            params.skip_special_tokens
            and request.stop_reason in self._detokenizer.tokenizer.special_ids
        ):
            return 0
        with_stop, without_stop = (
            self._detokenizer.delta(
                window_ids, ids, final=True, skip_special_tokens=params.skip_special_tokens
            )
            for ids in (new_ids, new_ids[:-1])
        )
        return len(with_stop) - len(without_stop)


def _stats(request: Request) -> RequestStats:
    now = time.monotonic()
    return RequestStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        arrival_time=request.times.arrival,
        first_scheduled_time=request.times.first_scheduled or now,
        first_token_time=request.times.first_token or now,
        finished_time=now,
    )
