"""RequestStream: from the engine's outputs for one request to the responses for its client."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from engine.core.queue_limits import Load
from engine.errors import EngineDeadError, RequestCancelledError, TridentError
from engine.protocol import AddRequest, Chunk, RequestStats, SequenceOutput, TokenLogprobs
from engine.token_ids import TokenIds, pack_token_ids


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
        request_id: given by the client; need not be unique.
        cache_salt: only requests with the same salt share cached prefixes.
    """

    prompt_token_ids: TokenIds
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
        """Return the message to the engine process."""
        return AddRequest(
            uid=uid,
            prompt_token_ids=pack_token_ids(self.prompt_token_ids),
            sampling_params=self.sampling_params,
            stream=self.stream,
            priority=self.priority,
            arrival_time=self.arrival_time,
            timeout_s=self.timeout_s,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
        )

    @property
    def load(self) -> Load:
        """What it adds to the queue."""
        return Load(self.num_sequences, len(self.prompt_token_ids))

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash that is the same for equal prompts with equal sampling parameters."""
        digest = hashlib.sha256(pack_token_ids(self.prompt_token_ids))
        digest.update(repr(self.sampling_params).encode())
        return digest.digest()


@dataclass
class _Sequence:
    """The outputs of one sequence since its last chunk."""

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
        """Return them as one chunk."""
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

    It ends twice: for its client when it has been `answered`, and for the engine process, which
    may go on for a moment after a cancellation, when it is `finished` or the process said so.

    Attributes:
        next_due: `time.monotonic()` second before which no further response need be sent; the
            senders' own.
        answered: whether the last response has been sent, or is under way.
        error: what it was or will be answered with in place of its last outputs.
        abort_sent: whether the engine process has been told to end it; the client's own.
        finish_reasons: by index of the sequence, of those that have finished.
        stats: of the sequences that have finished.
    """

    def __init__(self, uid: int, request: NewRequest, sink: ResponseSink) -> None:
        """Begin with nothing; the prompt itself is not kept."""
        self.uid = uid
        self.request_id = request.request_id
        self.load = request.load
        self.priority = request.priority
        self.fingerprint = request.fingerprint
        self.arrival_time = request.arrival_time
        self.next_due = 0.0
        self.answered = False
        self.error: TridentError | None = None
        self.abort_sent = False
        self.finish_reasons: dict[int, str] = {}
        self.stats: list[RequestStats] = []
        self.num_output_tokens = 0
        self._streams = request.stream
        self._text_prefix = request.text_prefix
        self._sink = sink
        self._lock = threading.Lock()
        self._sequences = [_Sequence() for _ in range(request.num_sequences)]

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished sequences."""
        return len(self._sequences) - len(self.finish_reasons)

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished; the last response may still be pending."""
        return self.num_unfinished == 0

    @property
    def is_urgent(self) -> bool:
        """Whether the next response is the last."""
        return self.finished or self.error is not None

    @property
    def is_refused(self) -> bool:
        """Whether it ended with an error that is neither a cancellation nor the engine's death."""
        harmless = RequestCancelledError | EngineDeadError | None
        return not isinstance(self.error, harmless)

    def append(self, output: SequenceOutput) -> bool:
        """Take an output; return whether there is something to deliver now."""
        with self._lock:
            if output.finish_reason is not None:
                self.finish_reasons[output.index] = output.finish_reason
            if output.stats is not None:
                self.stats.append(output.stats)
            if self.error is not None:
                return False
            self.num_output_tokens += len(output.token_ids)
            self._sequences[output.index].append(output)
            return self._streams or self.finished

    def fail(self, error: TridentError) -> bool:
        """End with `error` in place of what is pending; False if it has ended already."""
        with self._lock:
            if self.is_urgent:
                return False
            self.error = error
            return True

    def deliver(self) -> None:
        """Send what is pending, if anything is, as one response.

        For sender threads only, and never for one request in two threads at once.
        """
        with self._lock:
            if self.answered:
                return
            error, last = self.error, self.finished
            self.answered = self.is_urgent
            chunks = [c for s in self._sequences if (c := s.take(self._text_prefix)) is not None]
        if error is not None:
            self._sink.fail(error)
        elif chunks:
            self._sink.send(chunks, last=last)

    def abandon(self, error: TridentError) -> None:
        """After the sink raised: a last attempt to end the request, or its client would wait."""
        with self._lock:
            self.answered = True
            self.error = error
        with contextlib.suppress(Exception):
            self._sink.fail(error)
