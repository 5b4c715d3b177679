"""OutputBuilder: makes the outputs for clients from the new tokens of the sequences."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from engine.core.request import Request
from engine.core.seq_slots import SeqSlots
from engine.protocol.messages import OutputDetails, RequestStats, SequenceOutput
from engine.protocol.step_outputs import StepOutputs
from engine.text.detokenizer import Detokenizer

_WINDOW_PER_TOKEN = 32  # tokens of context that a chunk may carry for each new one
_LEAST_NORM = 1e-12  # as in torch's `normalize`
_MAX_WINDOW = 16  # tokens; a window up to this length is not shortened


class OutputBuilder:
    """Releases tokens in chunks, each with a window of earlier tokens to decode it."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        opens_window: NDArray[np.bool_],
        states: SeqSlots,
        *,
        stream_interval: int,
    ) -> None:
        """Build chunks of `stream_interval` tokens; the first has one, the last the rest.

        Args:
            detokenizer: knows the windows.
            opens_window: as in `TokenFlags`.
            states: of the running sequences.
            stream_interval: as in `EngineConfig`.
        """
        self._detokenizer = detokenizer
        self._opens_window = opens_window
        self._states = states
        self._stream_interval = stream_interval

    def build_rows(self, slots: NDArray[np.int32]) -> tuple[StepOutputs, list[Request]]:
        """Return the outputs that are due of running sequences, which have not ended.

        Each of them has a new token. Their window is the token before; the few sequences with
        another window are returned, for `build`.
        """
        states = self._states
        slots = slots[states.is_streamed[slots]]
        has_window = states.has_window[slots]
        others = [states.owner(slot) for slot in slots[has_window].tolist()]
        num_released = states.num_released_tokens[slots]
        starts = states.num_prompt_tokens[slots] + num_released
        num_new = states.num_tokens[slots] - starts
        is_due = ((num_new >= self._stream_interval) | (num_released == 0)) & ~has_window
        if np.count_nonzero(is_due) < len(slots):
            slots, starts, num_new = slots[is_due], starts[is_due], num_new[is_due]
        states.num_released_tokens[slots] += num_new
        owners, ends = slots.repeat(num_new), num_new.cumsum()
        positions = np.arange(len(owners)) + (starts + num_new - ends).repeat(num_new)
        token_ids = states.token_ids[owners, positions]
        skips_special_tokens = states.skips_special_tokens[slots]
        opens_window = self._opens_window[skips_special_tokens, token_ids[ends - 1]]
        for i in (~opens_window).nonzero()[0].tolist():
            window = states.token_ids[slots[i], starts[i] - 1 : starts[i] + num_new[i]]
            self._set_window(states.owner(slots[i]), window.tolist())
        details = {}
        for i in states.has_logprobs[slots].nonzero()[0].tolist():
            output = states.owner(slots[i]).output
            details[i] = OutputDetails(
                logprobs=output.logprobs, cumulative_logprob=output.cumulative_logprob
            )
            output.logprobs = []
        outputs = StepOutputs(
            uids=states.uid[slots],
            indexes=states.index[slots],
            num_tokens=num_new,
            num_window_tokens=np.ones_like(num_new),
            token_ids=token_ids,
            window_ids=states.token_ids[slots, starts - 1],
            details=details,
        )
        return outputs, others

    def build(self, request: Request) -> SequenceOutput | None:
        """Return the output of `request` that is due, or None; never None when it has ended.

        Raises:
            Exception: what it has failed with, or any error of the tokenizer's decoder.
        """
        if request.finish is not None and request.finish.error is not None:
            raise request.finish.error
        end = request.num_releasable_tokens
        if request.finish is None and end - request.num_released_tokens < self._interval(request):
            return None
        return self._release(request, end)

    def _interval(self, request: Request) -> int:
        """Return how many tokens a chunk must have."""
        if request.num_released_tokens == 0:
            return 1  # the first token goes out at once
        # Each chunk carries the window, which is long in a run of byte-fallback tokens: their text
        # is held back until the run ends. This keeps the sum of all windows linear in the tokens.
        return max(self._stream_interval, len(request.output.window_ids) // _WINDOW_PER_TOKEN)

    def _release(self, request: Request, end: int) -> SequenceOutput:
        output, finish = request.output, request.finish
        start = request.num_prompt_tokens + request.num_released_tokens
        token_ids = request.token_ids
        new_ids = token_ids[start : request.num_prompt_tokens + end].tolist()
        window_ids = output.window_ids or token_ids[start - 1 : start].tolist()
        request.num_released_tokens = end
        if finish is None:
            self._set_window(request, self._window_after(request, window_ids, new_ids))
        parser_state: tuple[int, int] = (0, 0)
        if output.tracker is not None and request.sampling_params.return_sections:
            parser_state = output.tracker.take_parser_state()
        logprobs = None
        if request.sampling_params.logprobs is not None:
            logprobs = output.logprobs[: len(new_ids)]
            del output.logprobs[: len(new_ids)]
        prompt_logprobs = None
        if request.prompt_scores is not None and request.prompt_scores.is_complete:
            prompt_logprobs = request.prompt_scores.message()
            request.prompt_scores = None
            if request.slot is not None:
                self._states.is_watched[request.slot] = request.is_watched
        return SequenceOutput(
            uid=request.uid,
            index=request.index,
            token_ids=new_ids,
            window_ids=window_ids,
            finish_reason=finish and finish.reason,
            stop_reason=finish and finish.stop_reason,
            text_cut=0 if finish is None else finish.text_cut,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else output.cumulative_logprob,
            stats=None if finish is None else _stats(request),
            omit_stop_token=finish is not None and finish.omit_stop_token,
            parser_state=parser_state,
            prompt_logprobs=prompt_logprobs,
            embedding=None if output.hidden is None else _embedding(output.hidden),
        )

    def _window_after(
        self, request: Request, window_ids: list[int], new_ids: list[int]
    ) -> list[int]:
        """Return the window after `new_ids`, as in `RequestOutput`; a short one is not reduced."""
        skip = request.sampling_params.skip_special_tokens
        if new_ids and self._opens_window[int(skip), new_ids[-1]]:
            return []
        if len(window_ids) + len(new_ids) <= _MAX_WINDOW:
            return window_ids + new_ids
        return self._detokenizer.next_window(window_ids, new_ids, skip_special_tokens=skip)

    def _set_window(self, request: Request, window_ids: list[int]) -> None:
        request.output.window_ids = window_ids
        if request.slot is not None:
            self._states.has_window[request.slot] = bool(window_ids)


def _embedding(hidden: NDArray[np.float32]) -> bytes:
    """Return `hidden` with the length 1."""
    wide = hidden.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype("<f4").tobytes()


def _stats(request: Request) -> RequestStats:
    now = time.monotonic()
    return RequestStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_draft_tokens=request.num_accepted_draft_tokens,
        arrival_time=request.times.arrival,
        first_scheduled_time=request.times.first_scheduled or now,
        first_token_time=request.times.first_token or now,
        finished_time=now,
    )
