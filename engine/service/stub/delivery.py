"""From the engine's outputs to the responses of one request: coalescing and order."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import TridentError
from engine.protocol import AddRequest, Chunk, SequenceOutput, TokenLogprobs


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
        cache_salt: only requests with the same one share cached prefixes.
    """

    prompt_token_ids: list[int]
    sampling_params: dict[str, object]
    num_sequences: int = 1
    stream: bool = True
    priority: int = 0
    timeout_s: float | None = None
    text_prefix: str = ""
    request_id: str = ""
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.monotonic)

    def message(self, uid: int) -> AddRequest:
        """Return what tells the engine process of it."""
        return AddRequest(
            uid=uid,
            prompt_token_ids=self.prompt_token_ids,
            sampling_params=self.sampling_params,
            stream=self.stream,
            priority=self.priority,
            arrival_time=self.arrival_time,
            timeout_s=self.timeout_s,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
        )


@dataclass
class _Sequence:
    """What one sequence has brought since its last chunk."""

    token_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    newest: SequenceOutput | None = None
    started: bool = False

    def append(self, output: SequenceOutput) -> None:
        if self.newest is None:
            self.window_ids = output.window_ids
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.newest = output

    def take(self, text_prefix: str) -> Chunk | None:
        """Return it as one chunk."""
        newest = self.newest
        if newest is None:
            return None
        chunk = Chunk(
            index=newest.index,
            window_ids=self.window_ids,
            token_ids=self.token_ids,
            finish_reason=newest.finish_reason,
            text_cut=newest.text_cut,
            logprobs=self.logprobs or None,
            cumulative_logprob=newest.cumulative_logprob,
            stats=newest.stats,
            text_prefix="" if self.started else text_prefix,
            omit_stop_token=newest.omit_stop_token,
        )
        self.token_ids, self.logprobs, self.newest, self.started = [], [], None, True
        return chunk


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
            prefix = self.request.text_prefix
            chunks = [c for s in self._sequences if (c := s.take(prefix)) is not None]
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
