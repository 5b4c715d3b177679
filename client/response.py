"""Decodes responses, and joins the chunks of a request to a completion."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from client.errors import ServerError
from client.protocol import (
    Chunk,
    Completion,
    CompletionOutput,
    Health,
    Logprob,
    Section,
    TokenLogprobs,
    Tokens,
)

_UNREADABLE = (
    *(ValueError, TypeError, LookupError, struct.error, msgspec.MsgspecError),
    RecursionError,  # nested too deeply
)

_NUMBERS = {
    name: struct.Struct(f"<{code}")
    for name, code in (
        ("INT32", "i"),
        ("INT64", "q"),
        ("UINT32", "I"),
        ("UINT64", "Q"),
        ("FP32", "f"),
        ("BOOL", "?"),
    )
}
_LENGTH = struct.Struct("<I")


def read_tensors(response: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the values of each output by its name, strings as bytes; other types are left out.

    Raises:
        ValueError, struct.error: the content does not have the shape in the response.
    """
    tensors: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        datatype = output.datatype
        if datatype == "BYTES":
            tensors[output.name] = _strings(raw)
        elif number := _NUMBERS.get(datatype):
            tensors[output.name] = [value for (value,) in number.iter_unpack(raw)]
    return tensors


def _strings(raw: bytes) -> list[bytes]:
    strings, offset = [], 0
    while offset < len(raw):
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size
        if offset + length > len(raw):
            raise ValueError(f"a string of {length} bytes where {len(raw) - offset} are left")
        strings.append(raw[offset : offset + length])
        offset += length
    return strings


class _Entry(msgspec.Struct):
    """One token of a position in the JSON of the output `logprobs`."""

    logprob: float
    rank: int
    decoded_token: str
    bytes: list[int] | None = None


# At each position the chosen token comes first.
_LOGPROBS = msgspec.json.Decoder(list[dict[int, _Entry]])
_STOP_REASON = msgspec.json.Decoder(str | int | None)
_SECTIONS = msgspec.json.Decoder(tuple[Section, ...])
# Of a long prompt they are many: they are taken apart one by one.
_PROMPT_LOGPROBS = msgspec.json.Decoder(list[msgspec.Raw])
_POSITION = msgspec.json.Decoder(dict[int, _Entry])


def read_chunks(response: service_pb2.ModelInferResponse) -> Iterator[Chunk]:
    """Yield the pieces of the request's sequences in one response; none in an empty final one.

    Raises:
        ServerError: it is not what this client understands.
    """
    try:
        yield from _chunks(read_tensors(response))
    except _UNREADABLE as error:
        raise ServerError(f"the answer cannot be read: {error}") from None


def _chunks(tensors: Mapping[str, Sequence[Any]]) -> Iterator[Chunk]:
    texts = tensors.get("text_output", ())
    columns = [
        tensors.get(name) or [default] * len(texts)
        for name, default in (
            ("sequence_index", 0),
            ("finish_reason", b""),
            ("num_output_tokens", 0),
            ("num_cached_tokens", 0),
            ("logprobs", None),
            ("sections", None),
            ("stop_reason", None),
        )
    ]
    num_input_tokens = (tensors.get("num_input_tokens") or (0,))[0]
    prompt = [_prompt_positions(content) for content in tensors.get("prompt_logprobs", ())]
    for text, index, reason, num_tokens, num_cached, logprobs, sections, stop_reason in zip(
        texts, *columns, strict=True
    ):
        yield Chunk(
            text=text.decode(),
            index=index,
            finish_reason=_finish_reason(reason),
            num_output_tokens=num_tokens,
            num_input_tokens=num_input_tokens,
            num_cached_tokens=num_cached,
            logprobs=None if logprobs is None else _positions(_LOGPROBS.decode(logprobs)),
            sections=None if sections is None else _SECTIONS.decode(sections),
            prompt_logprobs=prompt.pop() if prompt else None,
            stop_reason=None if stop_reason is None else _STOP_REASON.decode(stop_reason),
            embedding=tuple(tensors["embedding"]) if "embedding" in tensors else None,
        )


def _prompt_positions(content: bytes) -> tuple[TokenLogprobs, ...]:
    found = _PROMPT_LOGPROBS.decode(content)
    if found and bytes(found[0]) != b"null":
        raise ValueError("prompt_logprobs: the first token follows nothing")
    return _positions(_POSITION.decode(each) for each in found[1:])


def _positions(found: Iterable[Mapping[int, _Entry]]) -> tuple[TokenLogprobs, ...]:
    positions = []
    for entries in found:
        tokens = [
            Logprob(
                token_id,
                entry.decoded_token,
                entry.logprob,
                entry.rank,
                None if entry.bytes is None else bytes(entry.bytes),
            )
            for token_id, entry in entries.items()
        ]
        if not tokens:
            raise ValueError("logprobs: a position without tokens")
        positions.append(TokenLogprobs(tokens[0], tuple(sorted(tokens, key=attrgetter("rank")))))
    return tuple(positions)


def read_health(response: service_pb2.ModelInferResponse) -> Iterator[Health]:
    """Yield the health of the engine in one response.

    Raises:
        ServerError: it is not what this client understands.
    """
    for content in read_tensors(response).get("health", ()):
        try:
            yield msgspec.json.decode(content, type=Health)
        except _UNREADABLE as error:
            raise ServerError(f"health: the answer cannot be read: {error}") from None


def read_tokens(response: service_pb2.ModelInferResponse) -> Iterator[Tokens]:
    """Yield the tokens of a text in one response.

    Raises:
        ServerError: it is not what this client understands.
    """
    tensors = read_tensors(response)
    if "max_model_len" in tensors:
        texts = tuple(text.decode() for text in tensors["token_texts"])
        yield Tokens(tuple(tensors["input_ids"]), texts, tensors["max_model_len"][0])


def read_text(response: service_pb2.ModelInferResponse) -> Iterator[str]:
    """Yield the text of tokens."""
    for text in read_tensors(response).get("text", ()):
        yield text.decode()


def read_nothing(response: service_pb2.ModelInferResponse) -> Iterator[None]:
    """Yield nothing, whatever is in the response."""
    return iter(())


@dataclass
class Collector:
    """Puts the chunks of one request together again."""

    _started: float = field(default_factory=time.perf_counter)
    _ttft: float | None = None
    _chunks: dict[int, list[Chunk]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        if self._ttft is None:
            self._ttft = time.perf_counter() - self._started
        self._chunks.setdefault(chunk.index, []).append(chunk)

    def completion(self) -> Completion:
        """Return the whole; to be called once, when the last chunk is in.

        Raises:
            ServerError: there is no chunk.
        """
        if self._ttft is None:
            raise ServerError("the server ended the request without an answer")
        outputs = tuple(
            CompletionOutput(
                text="".join(chunk.text for chunk in chunks),
                index=index,
                finish_reason=chunks[-1].finish_reason,
                num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
                logprobs=_joined(chunks),
                sections=_joined_sections(chunks),
                stop_reason=chunks[-1].stop_reason,
            )
            for index, chunks in sorted(self._chunks.items())
        )
        every = [chunk for chunks in self._chunks.values() for chunk in chunks]
        found = (chunk.prompt_logprobs for chunk in every if chunk.prompt_logprobs is not None)
        return Completion(
            outputs,
            num_input_tokens=max(chunk.num_input_tokens for chunk in every),
            ttft=self._ttft,
            duration=time.perf_counter() - self._started,
            num_cached_tokens=max(chunk.num_cached_tokens for chunk in every),
            prompt_logprobs=next(found, None),
            embedding=every[-1].embedding,
        )


def _joined(chunks: Sequence[Chunk]) -> tuple[TokenLogprobs, ...] | None:
    if all(chunk.logprobs is None for chunk in chunks):
        return None
    return tuple(position for chunk in chunks for position in chunk.logprobs or ())


def _joined_sections(chunks: Sequence[Chunk]) -> tuple[Section, ...] | None:
    if all(chunk.sections is None for chunk in chunks):
        return None
    parts = [part for chunk in chunks for part in chunk.sections or ()]
    sections = (list(same) for _, same in groupby(parts, attrgetter("index")))
    return tuple(
        msgspec.structs.replace(
            same[0],
            text="".join(part.text for part in same),
            num_tokens=sum(part.num_tokens for part in same),
        )
        for same in sections
    )


def takes_batches(config: service_pb2.ModelConfigResponse) -> bool:
    """Return whether the inputs in the ensemble's configuration have a batch dimension."""
    return bool(config.config.max_batch_size > 0)


def _finish_reason(value: bytes) -> str | None:
    # vllm_backend writes "None" for a sequence that has not finished.
    return None if value in (b"", b"None") else value.decode()
