"""Serves `/v1/embeddings`: requests for the server, and vectors as JSON or base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from client.gateway.errors import ApiError
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation, UsageCount, merged
from client.gateway.openai.protocol import (
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    EmbeddingsUsage,
    names_of,
    prompts_of,
)

MAX_INPUTS = 2048  # OpenAI's

Vector = NDArray[np.float32]

_LEAST_NORM = 1e-12
_DECIMALS = (12, 10, 9, 8)  # enough, down to too few, for the values of a vector of length 1


def shortened(values: Vector, dimensions: int) -> Vector:
    """Return the first `dimensions`, of length 1, as Matryoshka embeddings are shortened."""
    if dimensions == len(values):
        return values
    wide = values[:dimensions].astype(np.float64)
    found: Vector = (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype("f4")
    return found


def encoded(values: Vector, form: Literal["float", "base64"]) -> msgspec.Raw:
    """Return the JSON of numbers, or of their base64 as little-endian float32."""
    if form == "base64":
        return msgspec.Raw(b'"%b"' % base64.b64encode(values.astype("<f4").tobytes()))
    return msgspec.Raw(msgspec.json.encode(_brief(values).tolist()))


def _brief(values: Vector) -> NDArray[np.float64]:
    """Return them with the digits that float32 needs: as they are, JSON has 17 of each."""
    wide = values.astype(np.float64)
    found = wide
    for decimals in _DECIMALS:
        rounded = wide.round(decimals)
        found = np.where(rounded.astype(np.float32) == values, rounded, found)
    return found


async def embeddings(gateway: Gateway, body: EmbeddingsRequest) -> Embeddings:
    """Return the embeddings that `body` asks for.

    Raises:
        ApiError: a field is wrong, or the server refuses it, or fails.
    """
    model, inputs = gateway.model_named(body.model), prompts_of(body.input)
    if not 1 <= len(inputs) <= MAX_INPUTS:
        text = f"must have 1 to {MAX_INPUTS} elements, not {len(inputs)}"
        raise ApiError(text, param="input")
    request_id = f"embd-{uuid4().hex}"
    options = body.model_dump(include={"cache_salt", "truncate_prompt_tokens"}, exclude_none=True)
    asked = [
        Generation(
            f"{request_id}-{number}",
            {"return_embedding": True, **options},
            prompt=each,
            priority=body.priority or 0,
            names=names_of("input", body.input, number),
        )
        for number, each in enumerate(inputs)
    ]
    usage, found = UsageCount(), dict[int, msgspec.Raw]()
    async with aclosing(merged(gateway.client, asked)) as chunks:
        async for number, chunk in chunks:
            usage.add(number, chunk)
            if chunk.embedding is None:
                raise ApiError("the answer was ended from outside", code="internal")
            found[number] = _json(chunk.embedding, body)  # at once, not all of them at the end
    num_tokens = usage.usage().prompt_tokens
    data = [Embedding(found[number], number) for number in range(len(inputs))]
    return Embeddings(data, model, EmbeddingsUsage(num_tokens, num_tokens))


def _json(embedding: Sequence[float], body: EmbeddingsRequest) -> msgspec.Raw:
    values = np.array(embedding, dtype=np.float32)
    if body.dimensions is not None:
        if body.dimensions > len(values):
            has = f"must be at most {len(values)}, as the model has (got {body.dimensions})"
            raise ApiError(has, param="dimensions")
        values = shortened(values, body.dimensions)
    return encoded(values, body.encoding_format)
