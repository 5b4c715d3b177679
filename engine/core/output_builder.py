"""OutputBuilder: from the tokens of the sequences to the outputs for their clients."""

from __future__ import annotations

import time

from engine.core.request import Request
from engine.protocol import RequestStats, SequenceOutput
from engine.text.detokenizer import Detokenizer

_WINDOW_PER_TOKEN = 32  # tokens of context that a chunk may carry for each new one
_MAX_WINDOW = 16  # tokens; a window up to this length is not shortened


class OutputBuilder:
    """Releases tokens in chunks, each with a window of earlier tokens to decode it."""

    def __init__(self, detokenizer: Detokenizer, *, stream_interval: int) -> None:
        """Build chunks of `stream_interval` tokens; the first has one, the last the rest."""
        self._detokenizer = detokenizer
        self._stream_interval = stream_interval

    def build(self, request: Request) -> SequenceOutput | None:
        """Return the output of `request` that is due, or None; never None when it has ended."""
        end = request.num_releasable_tokens
        num_new = end - request.output.num_released_tokens
        if request.finish is None and num_new < self._interval(request):
            return None
        return self._release(request, end)

    def _interval(self, request: Request) -> int:
        """Return how many tokens a chunk must have."""
        if request.output.num_released_tokens == 0:
            return 1  # the first token goes out at once
        # Each chunk carries the window, which is long in a run of byte-fallback tokens: their text
        # is held back until the run ends. This keeps the sum of all windows linear in the tokens.
        return max(self._stream_interval, len(request.output.window_ids) // _WINDOW_PER_TOKEN)

    def _release(self, request: Request, end: int) -> SequenceOutput:
        state, finish = request.output, request.finish
        start, state.num_released_tokens = state.num_released_tokens, end
        begin = request.num_prompt_tokens
        new_ids = request.token_ids[begin + start : begin + end]
        window_ids = state.window_ids
        if finish is None:
            state.window_ids = self._next_window(request, new_ids)
        logprobs = None
        if request.sampling_params.logprobs is not None:
            logprobs = state.logprobs[: end - start]
            del state.logprobs[: end - start]
        return SequenceOutput(
            uid=request.uid,
            index=request.index,
            token_ids=new_ids,
            window_ids=window_ids,
            finish_reason=finish and finish.reason,
            stop_reason=finish and finish.stop_reason,
            text_cut=0 if finish is None else finish.text_cut,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else state.cumulative_logprob,
            stats=None if finish is None else _stats(request),
            omit_stop_token=finish is not None and finish.omit_stop_token,
        )

    def _next_window(self, request: Request, new_ids: list[int]) -> list[int]:
        """Return the window after `new_ids`; a short one is not reduced."""
        window_ids = request.output.window_ids
        if len(window_ids) + len(new_ids) <= _MAX_WINDOW:
            return window_ids + new_ids
        return self._detokenizer.next_window(
            window_ids, new_ids, skip_special_tokens=request.sampling_params.skip_special_tokens
        )


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
