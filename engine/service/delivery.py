"""From the engine's outputs to the responses of one request: coalescing and order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import TridentError
from engine.service.messages import Chunk, SequenceOutput, TokenLogprobs


class ResponseSink(Protocol):
    """Where the responses of one request go. Called by one thread at a time; may block."""

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        """Answer with `chunks`, at most one per sequence, by index; nothing follows the `last`."""

    def fail(self, error: TridentError) -> None:
        """Answer with an error; nothing follows."""


@dataclass(frozen=True)
class NewRequest:
    """One prompt to complete, as the engine stub hands it over.

    Attributes:
        sampling_params: `SamplingParams.model_dump(exclude_defaults=True)`.
        num_sequences: how many sequences will finish.
        stream: answer as tokens come, or once when all sequences have finished.
        arrival_time: `time.monotonic()` second.
        timeout_s: from arrival; then the sequences end with "abort". None: no deadline.
        text_prefix: goes with the first chunk of each sequence.
        request_id: the client's own name for it; need not be unique.
    """

    prompt_token_ids: list[int]
    sampling_params: dict[str, object]
    num_sequences: int = 1
    stream: bool = True
    priority: int = 0
    timeout_s: float | None = None
    text_prefix: str = ""
    request_id: str = ""
    arrival_time: float = field(default_factory=time.monotonic)


@dataclass
class _Sequence:
    """The output of one sequence: what was sent, then what is pending."""

    token_ids: list[int] = field(default_factory=list)
    num_sent: int = 0
    started: bool = False
    window: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pending: SequenceOutput | None = None  # the newest one

    def append(self, output: SequenceOutput) -> None:
        if self.pending is None:
            self.window = output.window
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.pending = output

    def take(self, prompt: Sequence[int], text_prefix: str) -> Chunk | None:
        """Return what came since the last call as one chunk."""
        newest, self.pending = self.pending, None
        if newest is None:
            return None
        chunk = Chunk(
            index=newest.index,
            window_ids=_window(prompt, self.token_ids, self.num_sent, self.window),
            token_ids=self.token_ids[self.num_sent :],
            finish_reason=newest.finish_reason,
            text_cut=newest.text_cut,
            logprobs=self.logprobs or None,
            cumulative_logprob=newest.cumulative_logprob,
            stats=newest.stats,
            text_prefix="" if self.started else text_prefix,
        )
        self.num_sent, self.logprobs, self.started = len(self.token_ids), [], True
        return chunk


def _window(prompt: Sequence[int], output: list[int], end: int, length: int) -> list[int]:
    """Return the `length` ids (fewer at the start) before position `end` of the output."""
    from_output = output[max(0, end - length) : end]
    from_prompt = length - len(from_output)
    return [*prompt[max(0, len(prompt) - from_prompt) :], *from_output]


class RequestStream:
    """One request in flight: takes outputs from the receiver, gives responses to its sink.

    Attributes:
        next_due: `time.monotonic()` second before which no further response need be sent; the
            senders' own.
        answered: whether the last response has been sent, or is under way.
    """

    def __init__(self, uid: int, request: NewRequest, sink: ResponseSink) -> None:
        self.uid = uid
        self.request = request
        self.next_due = 0.0
        self._sink = sink
        self._lock = threading.Lock()
        self._sequences = [_Sequence() for _ in range(request.num_sequences)]
        self.num_unfinished = request.num_sequences  # sequences that go on
        self._error: TridentError | None = None
        self.answered = False

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished; the last response may still be pending."""
        return self.num_unfinished == 0

    @property
    def is_urgent(self) -> bool:
        """Whether the next response is the last."""
        return self.finished or self._error is not None

    def append(self, output: SequenceOutput) -> bool:
        """Take an output; return whether there is something to deliver now."""
        with self._lock:
            self._sequences[output.index].append(output)
            if output.finish_reason is not None:
                self.num_unfinished -= 1
            return self.request.stream or self.finished

    def fail(self, error: TridentError) -> None:
        """End with `error` in place of what is pending."""
        with self._lock:
            self._error = error

    def deliver(self) -> None:
        """Send what is pending, if anything is, as one response.

        For sender threads only, and never for one request in two threads at once.
        """
        with self._lock:
            if self.answered:
                return
            error, last = self._error, self.finished
            self.answered = last or error is not None
            prompt, prefix = self.request.prompt_token_ids, self.request.text_prefix
            chunks = [c for s in self._sequences if (c := s.take(prompt, prefix)) is not None]
        if error is not None:
            self._sink.fail(error)
        elif chunks:
            self._sink.send(chunks, last=last)

    def abandon(self) -> None:
        """After the sink raised: a last attempt to end the request, lest its client wait."""
        with self._lock:
            self.answered = True
        with contextlib.suppress(Exception):
            self._sink.fail(TridentError("internal error"))
