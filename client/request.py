"""Encodes requests: tensors of one element each, in protobuf."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from client.errors import InvalidRequestError
from client.protocol import Json, Message, Prompt

ENSEMBLE = "ensemble"
ENGINE = "engine"
TOKENIZER = "tokenizer"

# What `client.response` reads; a response has those of them that the request has asked for. Of
# requests with stop strings it reads `stop_reason` too, and of those for an embedding that.
COMPLETION_OUTPUTS = (
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "sequence_index",
    "num_cached_tokens",
    "logprobs",
    "sections",
    "prompt_logprobs",
)

# The server's deadline, which frees what a request holds when its client has vanished unnoticed.
# It is that much later than the client's own, so that one side alone decides how a request ends.
_GRACE_S = 1.0
_MAX_TIMEOUT_US = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """`size` values: `datatype` is Triton's name, `content` their little-endian bytes."""

    name: str
    datatype: str
    content: bytes
    size: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, without what depends on the attempt.

    Attributes:
        model: which of the server's models is asked.
        tensors: its inputs.
        id: the request id, or empty.
        has_deadline: whether the timeout is sent to the server.
        outputs: that are read of the responses; empty: all. What Triton's ensemble spends on a
            response grows with the square of their number.
    """

    model: str
    tensors: tuple[Tensor, ...]
    id: str = ""
    has_deadline: bool = False
    outputs: tuple[str, ...] = ()

    def message(self, *, batched: bool, timeout: float | None) -> service_pb2.ModelInferRequest:
        """Return the protobuf of one attempt.

        Args:
            batched: whether the server's models take a batch dimension.
            timeout: seconds that are left, or None.
        """
        message = service_pb2.ModelInferRequest(model_name=self.model, id=self.id)
        deadline = (_timeout(timeout),) if self.has_deadline and timeout is not None else ()
        for tensor in (*self.tensors, *deadline):
            shape = [1, tensor.size] if batched else [tensor.size]
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            message.raw_input_contents.append(tensor.content)
        for name in self.outputs:
            message.outputs.add(name=name)
        # The FINAL flag may come with the last data or alone after it: ask for both.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message


def completion(
    prompt: Prompt | None,
    messages: Sequence[Message] | None,
    sampling: Mapping[str, Any],
    *,
    chat_parameters: Mapping[str, Any] | None = None,
    priority: int,
    request_id: str,
    model: str = ENSEMBLE,
) -> Request:
    """Return the request to complete a prompt or to answer messages.

    It always asks for a stream: only while it answers does the server notice that a connection
    has gone.

    Args:
        sampling: see `SamplingOptions`.
        chat_parameters: see `ChatParameters`.
        priority: smaller runs earlier, if the server schedules by priority.
        model: the name under which the server's ensemble is served.

    Raises:
        InvalidRequestError: not exactly one of the two is given, or an argument cannot be sent.
    """
    asked = _prompt(prompt, messages, chat_parameters)
    flags = {
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_num_cached_tokens": True,
    }
    outputs: tuple[str, ...] = COMPLETION_OUTPUTS
    if sampling.get("logprobs") is not None:
        flags["return_logprobs"] = True
    if sampling.get("stop"):
        flags["return_stop_reason"] = True
        outputs += ("stop_reason",)
    if sampling.get("return_embedding"):
        outputs += ("embedding",)
    tensors = (
        _string("sampling_parameters", _object("sampling options", sampling)),
        *asked,
        *(_boolean(name, value) for name, value in flags.items()),
        *([_int32("priority", priority)] if priority else []),
    )
    return Request(model, tensors, _checked_id(request_id), has_deadline=True, outputs=outputs)


def stop(request_id: str, model: str = ENSEMBLE) -> Request:
    """Return the request to end those of that id: TensorRT-LLM's convention.

    Raises:
        InvalidRequestError: the id is empty or cannot be sent.
    """
    if not request_id:
        raise InvalidRequestError("must not be empty", param="request_id")
    return Request(model, (_boolean("stop", True),), _checked_id(request_id))


def tokenize(
    text: str | None,
    messages: Sequence[Message] | None,
    chat_parameters: Mapping[str, Any] | None,
    add_special_tokens: bool | None,
    tenant: str | None = None,
    tenant_key: str | None = None,
) -> Request:
    """Return the request for the tokens of a text or of messages.

    Raises:
        InvalidRequestError: not exactly one of the two is given, or it cannot be sent.
    """
    asked = [_boolean("tokenize", True), *_prompt(text, messages, chat_parameters)]
    if add_special_tokens is not None:
        asked.append(_boolean("add_special_tokens", add_special_tokens))
    named = {"tenant": tenant, "tenant_key": tenant_key}
    if given := {name: value for name, value in named.items() if value is not None}:
        asked.append(_string("sampling_parameters", json_text("tenant", given)))
    return Request(TOKENIZER, tuple(asked))


def detokenize(token_ids: Sequence[int]) -> Request:
    """Return the request for the text of tokens.

    Raises:
        InvalidRequestError: they cannot be sent.
    """
    ids = _int32s("input_ids", token_ids)
    return Request(TOKENIZER, (_boolean("detokenize", True), ids))


def health() -> Request:
    """Return the request for the engine's health."""
    return Request(ENGINE, (_boolean("health", True),))


def _prompt(
    prompt: Prompt | None,
    messages: Sequence[Message] | None,
    chat_parameters: Mapping[str, Any] | None,
) -> list[Tensor]:
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either a prompt or messages, not both or none")
    if messages is None:
        if chat_parameters is not None:
            raise InvalidRequestError("needs messages", param="chat_parameters")
        if isinstance(prompt, (list, tuple)):
            return [_int32s("input_ids", prompt)]
        return [_string("text_input", prompt)]
    asked = [_string("messages", json_text("messages", messages))]
    if chat_parameters:
        asked.append(_string("chat_parameters", json_text("chat_parameters", chat_parameters)))
    return asked


def _string(name: str, text: Any) -> Tensor:
    content = _utf8(name, text)
    return Tensor(name, "BYTES", struct.pack("<I", len(content)) + content)


def _boolean(name: str, value: bool) -> Tensor:
    return Tensor(name, "BOOL", struct.pack("<?", value))


def _int32(name: str, value: int) -> Tensor:
    try:
        return Tensor(name, "INT32", struct.pack("<i", value))
    except struct.error:
        raise InvalidRequestError(f"must be a 32-bit integer (got {value!r})", param=name) from None


def _int32s(name: str, values: Sequence[int]) -> Tensor:
    try:
        content = struct.pack(f"<{len(values)}i", *values)
    except struct.error:  # names the index of the first that is none
        each = (_int32(f"{name}[{index}]", value) for index, value in enumerate(values))
        content = b"".join(tensor.content for tensor in each)
    return Tensor(name, "INT32", content, len(values))


def _timeout(seconds: float) -> Tensor:
    microseconds = min(math.ceil((seconds + _GRACE_S) * 1e6), _MAX_TIMEOUT_US)
    return Tensor("timeout", "UINT64", struct.pack("<Q", microseconds))


def json_text(what: str, value: Any) -> str:
    """Return `value` as JSON.

    Raises:
        InvalidRequestError: it has none; the text begins with `what` it is.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"cannot be written as JSON: {error}", param=what) from None


def _object(what: str, members: Mapping[str, Any]) -> str:
    """Return the JSON of an object, some of whose members may be JSON already."""
    texts = {
        name: value.text if isinstance(value, Json) else json_text(what, value)
        for name, value in members.items()
    }
    return "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"


def _checked_id(request_id: str) -> str:
    _utf8("request_id", request_id)
    return request_id


def _utf8(name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequestError(f"must be a string (got {type(text).__name__})", param=name)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"is not valid Unicode: {error.reason}", param=name) from None
