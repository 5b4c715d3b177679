"""What goes over the wire: one request as protobuf, its responses as typed chunks."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import grpc
from tritonclient.grpc import InferResult, service_pb2

from client.errors import (
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
    from_status,
    from_text,
)

MODEL = "ensemble"

# tritonclient's limits are gRPC's 4 MB unless told otherwise; a prompt may be longer.
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

_TIMED_OUT = "the request took longer than its timeout"


class SamplingOptions(TypedDict, total=False):
    """What a request may ask of the sampler, in vLLM's names; see `engine.SamplingParams`."""

    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    bad_words: Sequence[str]
    ignore_eos: bool
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    skip_special_tokens: bool


Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of one sequence.

    Attributes:
        text: what follows the text of the earlier chunks; may be empty.
        index: which of the request's `n` sequences.
        finish_reason: `stop`, `length` or `abort` on the sequence's last chunk, else None.
        num_output_tokens: tokens in this chunk.
        num_input_tokens: tokens of the prompt.
    """

    text: str
    index: int = 0
    finish_reason: str | None = None
    num_output_tokens: int = 0
    num_input_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished sequence of a request; attributes as in `Chunk`, over the whole of it."""

    text: str
    index: int = 0
    finish_reason: str | None = None
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    Attributes:
        outputs: its sequences, by index.
        num_input_tokens: tokens of the prompt.
        ttft: seconds from sending to the first chunk; None if it was not streamed.
        duration: seconds from sending to the end.
    """

    outputs: tuple[CompletionOutput, ...]
    num_input_tokens: int
    ttft: float | None
    duration: float

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended."""
        return self.outputs[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(output.num_output_tokens for output in self.outputs)


@dataclass
class Collector:
    """Puts the chunks of one request together again."""

    streamed: bool
    _started: float = field(default_factory=time.perf_counter)
    _ttft: float | None = None
    _chunks: dict[int, list[Chunk]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        if self.streamed and self._ttft is None:
            self._ttft = time.perf_counter() - self._started
        self._chunks.setdefault(chunk.index, []).append(chunk)

    def completion(self) -> Completion:
        """Return the whole; to be called once, when the last chunk is in."""
        outputs = tuple(
            CompletionOutput(
                text="".join(chunk.text for chunk in chunks),
                index=index,
                finish_reason=chunks[-1].finish_reason,
                num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
            )
            for index, chunks in sorted(self._chunks.items())
        )
        prompt = max(c.num_input_tokens for chunks in self._chunks.values() for c in chunks)
        return Completion(outputs, prompt, self._ttft, time.perf_counter() - self._started)


def check_prompt(prompt: str | None, messages: Sequence[Message] | None) -> None:
    """Raise `InvalidRequestError` unless exactly one of the two is given."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either a prompt or messages")


def build_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    sampling: Mapping[str, Any],
    *,
    stream: bool,
    batched: bool,
) -> service_pb2.ModelInferRequest:
    """Return the request of one completion.

    Args:
        batched: whether the server's models take a batch dimension.

    Raises:
        InvalidRequestError: an argument cannot be written as JSON.
    """
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    texts = {"sampling_parameters": _json("sampling options", sampling)}
    if prompt is not None:
        texts["text_input"] = prompt
    else:
        texts["messages"] = _json("messages", messages)
    for name, text in texts.items():
        content = _utf8(name, text)
        _add_input(request, name, "BYTES", struct.pack("<I", len(content)) + content, batched)
    flags = {
        "stream": stream,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    for name, value in flags.items():
        _add_input(request, name, "BOOL", struct.pack("<?", value), batched)
    # The FINAL flag may come with the last data or alone after it: ask for both.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _add_input(
    request: service_pb2.ModelInferRequest, name: str, datatype: str, content: bytes, batched: bool
) -> None:
    tensor = request.inputs.add(name=name, datatype=datatype)
    tensor.shape.extend([1, 1] if batched else [1])
    request.raw_input_contents.append(content)


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{what}: cannot be written as JSON: {error}") from None


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name}: is not valid Unicode: {error.reason}") from None


def is_final(response: service_pb2.ModelStreamInferResponse) -> bool:
    """Tell whether nothing follows `response`."""
    final = response.infer_response.parameters["triton_final_response"].bool_param
    return bool(final or response.error_message)


def read_chunks(response: service_pb2.ModelStreamInferResponse) -> Iterator[Chunk]:
    """Yield the pieces of the request's sequences in one response; none in an empty final one.

    Raises:
        TridentClientError: the response is an error.
    """
    if response.error_message:
        raise from_text(response.error_message)
    result = InferResult(response.infer_response)
    texts = _values(result, "text_output")
    columns = [
        _values(result, name) or [default] * len(texts)
        for name, default in (
            ("sequence_index", 0),
            ("finish_reason", b""),
            ("num_output_tokens", 0),
        )
    ]
    num_input_tokens = int((_values(result, "num_input_tokens") or [0])[0])
    for text, index, reason, num_output_tokens in zip(texts, *columns, strict=True):
        yield Chunk(
            text=text.decode(),
            index=int(index),
            finish_reason=_finish_reason(reason),
            num_output_tokens=int(num_output_tokens),
            num_input_tokens=num_input_tokens,
        )


def _values(result: InferResult, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else list(array.reshape(-1))


def _finish_reason(value: bytes) -> str | None:
    # "None" is vllm_backend's word for a sequence that goes on.
    return None if value in (b"", b"None") else value.decode()


def deadline(timeout: float | None) -> float:
    """Return when, on `time.monotonic`, a request that begins now is out of time."""
    return time.monotonic() + (float("inf") if timeout is None else timeout)


def rpc_error(error: grpc.RpcError, url: str, deadline: float) -> TridentClientError:
    """Return our error for one of gRPC, made while talking to `url` until `deadline`."""
    status, details = error.code().name, error.details() or ""
    # A deadline that strikes while the request is being written comes as an "internal error".
    if status == "DEADLINE_EXCEEDED":
        return RequestTimeoutError(_TIMED_OUT)
    if status == "CANCELLED" or time.monotonic() >= deadline:
        return cancelled(deadline)
    if status == "UNAVAILABLE":  # gRPC's own words, full of addresses if it cannot connect
        if re.search(r"failed to connect|errors resolving", details, re.IGNORECASE):
            details = f"no server answers at {url}"
        else:
            details = f"the connection to {url} was lost: {details}"
    return from_status(status, details)


def cancelled(deadline: float) -> TridentClientError:
    """Return the error for a call that was ended on this side, by time or by `close`."""
    if time.monotonic() >= deadline:
        return RequestTimeoutError(_TIMED_OUT)
    return RequestCancelledError("the request was cancelled")


def unfinished() -> TridentClientError:
    """Return the error for a stream that ends before its final response."""
    return UnavailableError("the server ended the answer before it was complete")


def takes_batches(config: service_pb2.ModelConfigResponse) -> bool:
    """Tell from the ensemble's configuration whether its inputs have a batch dimension."""
    return bool(config.config.max_batch_size > 0)
