"""RequestStream: from the engine's outputs for one request to the responses for its client."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from msgspec import structs

from engine.core.queue.queue_limits import Load
from engine.errors import EngineDeadError, RequestCancelledError, TridentError
from engine.protocol.messages import NO_DETAILS, AddRequest, Chunk, Outputs, RequestStats
from engine.protocol.step_outputs import StepOutputs
from engine.protocol.token_ids import TOKEN_ID_BYTES, TokenIds, pack_token_ids


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
        num_dropped: how many more run, which are not handed out.
        stream: answer as tokens come, or once when all sequences have finished.
        arrival_time: `time.monotonic()` second.
        timeout_s: from arrival; then the sequences end with "abort". None: no deadline.
        text_prefix: goes with the first chunk of each sequence.
        request_id: given by the client; need not be unique.
        cache_salt: only requests with the same salt share cached prefixes.
        tenant: shares the engine equally with the others.
    """

    prompt_token_ids: TokenIds
    sampling_params: dict[str, object]
    num_sequences: int = 1
    num_dropped: int = 0
    stream: bool = True
    priority: int = 0
    timeout_s: float | None = None
    text_prefix: str = ""
    request_id: str = ""
    cache_salt: str = ""
    tenant: str = ""
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
            tenant=self.tenant,
        )

    @property
    def load(self) -> Load:
        """What it adds to the queue."""
        return Load(self.num_sequences + self.num_dropped, len(self.prompt_token_ids))

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash that is the same for equal prompts with equal sampling parameters."""
        digest = hashlib.sha256(pack_token_ids(self.prompt_token_ids))
        digest.update(repr(self.sampling_params).encode())
        return digest.digest()


class _Sequence:
    """The chunks of one sequence since its last response."""

    def __init__(self) -> None:
        self.pending: list[Chunk] = []
        self._started = False

    def take(self, text_prefix: str) -> Chunk | None:
        """Return them as one chunk."""
        if not self.pending:
            return None
        chunk = self.pending[0] if len(self.pending) == 1 else _joined(self.pending)
        self.pending = []
        if text_prefix and not self._started:
            chunk = structs.replace(chunk, text_prefix=text_prefix)
        self._started = True
        return chunk


def _joined(chunks: list[Chunk]) -> Chunk:
    """Return successive chunks of one sequence as one."""
    details = chunks[-1].details
    if any(chunk.details.logprobs for chunk in chunks):
        logprobs = [position for chunk in chunks for position in chunk.details.logprobs or ()]
        details = structs.replace(details, logprobs=logprobs)
    if details.parser_state != chunks[0].details.parser_state:
        details = structs.replace(details, parser_state=chunks[0].details.parser_state)
    if chunks[0].details.prompt_logprobs is not None:
        details = structs.replace(details, prompt_logprobs=chunks[0].details.prompt_logprobs)
    token_ids = b"".join([chunk.token_ids for chunk in chunks])
    return Chunk(chunks[0].index, chunks[0].window_ids, token_ids, details)


def chunks_of(outputs: Outputs) -> Iterator[tuple[int, Chunk]]:
    """Yield each row with the uid of its request. The bytes of its ids are copied, not decoded.

    Raises:
        ValueError: the columns do not fit together.
    """
    columns = StepOutputs.parse(outputs)
    # Ends of the rows, in bytes.
    ends = (TOKEN_ID_BYTES * np.cumsum(columns.num_tokens, dtype=np.int64)).tolist()
    window_ends = (TOKEN_ID_BYTES * np.cumsum(columns.num_window_tokens, dtype=np.int64)).tolist()
    start = window_start = 0
    table = zip(columns.uids.tolist(), columns.indexes.tolist(), ends, window_ends, strict=True)
    for row, (uid, index, end, window_end) in enumerate(table):
        yield (
            uid,
            Chunk(
                index,
                outputs.window_ids[window_start:window_end],
                outputs.token_ids[start:end],
                columns.details.get(row, NO_DETAILS),
            ),
        )
        start, window_start = end, window_end


class RequestStream:
    """One request in flight: takes outputs from the receiver, gives responses to its sink.

    It ends twice: for its client when it has been `answered`, and for the engine process, which
    may go on for a moment after a cancellation, when it is `finished` or the process said so.

    Attributes:
        next_due: `time.monotonic()` second before which no further response need be sent; the
            delivery's own.
        answered: whether the last response has been sent, or is under way.
        error: what it was or will be answered with in place of its last outputs.
        abort_sent: whether the engine process has been sent its abort; the client's own.
        finish_reasons: by index of the sequence, of those that have finished.
        stats: of the sequences that have finished.
    """

    def __init__(self, uid: int, request: NewRequest, sink: ResponseSink) -> None:
        """Begin with nothing; the prompt itself is not kept."""
        self.uid = uid
        self.request_id = request.request_id
        self.load = request.load
        self.priority = request.priority
        self.tenant = request.tenant
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
        self._waits = False  # whether `append` has asked for a `deliver` that is still to come
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
        return len(self.finish_reasons) == len(self._sequences)

    @property
    def is_urgent(self) -> bool:
        """Whether the next response is the last."""
        return self.error is not None or self.finished

    @property
    def is_refused(self) -> bool:
        """Whether it ended with an error that is neither a cancellation nor the engine's death."""
        harmless = RequestCancelledError | EngineDeadError | None
        return not isinstance(self.error, harmless)

    def append(self, chunk: Chunk) -> bool:
        """Take an output; return whether it needs a `deliver` beside that of the outputs before."""
        details = chunk.details
        with self._lock:
            if details is not NO_DETAILS:
                if details.finish_reason is not None:
                    self.finish_reasons[chunk.index] = details.finish_reason
                if details.stats is not None:
                    self.stats.append(details.stats)
            if self.error is not None:
                return False
            self._sequences[chunk.index].pending.append(chunk)
            is_first, self._waits = not self._waits, self._streams
            return (self._streams and is_first) or self.finished

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
            self._waits = False
            chunks = [c for s in self._sequences if (c := s.take(self._text_prefix)) is not None]
            self.num_output_tokens += sum(chunk.num_tokens for chunk in chunks)
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
