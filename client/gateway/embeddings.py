"""Embeddings: a request of `/v1/embeddings` to requests of the server, and the answer back."""

from __future__ import annotations

import base64
from contextlib import aclosing
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from client.gateway.errors import ApiError
from client.gateway.gateway import Gateway
from client.gateway.generation import Generation, UsageCount, merged
from client.gateway.schemas.completions import prompts_of
from client.gateway.schemas.embeddings import (
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    EmbeddingsUsage,
)

MAX_INPUTS = 2048  # OpenAI's
_AT_ONCE = 32  # of one request: enough for the stages; others wait for no more prompts
_LEAST_NORM = 1e-12


async def embeddings(gateway: Gateway, body: EmbeddingsRequest) -> Embeddings:
    """Return the embeddings that `body` asks for.

    Raises:
        ApiError: a field is wrong, or the server refuses it, or fails.
    """
    model, inputs = gateway.model_named(body.model), prompts_of(body.input)
    if not 1 <= len(inputs) <= MAX_INPUTS:
        text = f"input: must have 1 to {MAX_INPUTS} elements, not {len(inputs)}"
        raise ApiError(400, text, param="input")
    request_id = f"embd-{uuid4().hex}"
    options = body.model_dump(include={"cache_salt", "truncate_prompt_tokens"}, exclude_none=True)
    names = dict.fromkeys(("text_input", "input_ids", "prompt"), "input")
    asked = [
        Generation(
            f"{request_id}-{number}",
            {"return_embedding": True, **options},
            prompt=each,
            priority=body.priority or 0,
            names=names,
        )
        for number, each in enumerate(inputs)
    ]
    usage, found = UsageCount(), dict[int, list[float] | str]()
    async with aclosing(merged(gateway.client, asked, at_once=_AT_ONCE)) as chunks:
        async for number, chunk in chunks:
            usage.add(number, chunk)
            if chunk.embedding is None:
                raise ApiError(500, "the answer was ended from outside", "server_error")
            values = _shortened(np.array(chunk.embedding, dtype=np.float32), body.dimensions)
            found[number] = (
                _encoded(values) if body.encoding_format == "base64" else values.tolist()
            )
    num_tokens = usage.usage().prompt_tokens
    data = [Embedding(found[number], number) for number in range(len(inputs))]
    return Embeddings(data, model, EmbeddingsUsage(num_tokens, num_tokens))


def _shortened(values: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions`, of length 1, as Matryoshka embeddings are shortened."""
    if dimensions is None or dimensions == len(values):
        return values
    if dimensions > len(values):
        text = f"dimensions: must be at most {len(values)}, what the model has (got {dimensions})"
        raise ApiError(400, text, param="dimensions")
    wide = values[:dimensions].astype(np.float64)
    found: NDArray[np.float32] = (wide / max(float(np.linalg.norm(wide)), _LEAST_NORM)).astype("f4")
    return found


def _encoded(values: NDArray[np.float32]) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
