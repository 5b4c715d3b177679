"""`/v1/embeddings`: the bodies of requests and of responses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct
from pydantic import Field

from client.gateway.schemas.completions import Prompts
from client.gateway.schemas.sampling import Fields, Yes, unsupported


class EmbeddingsRequest(Fields):
    """Texts, or prompts of token ids, to be embedded. `user` has no effect: it is for OpenAI."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    # vLLM's
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: Annotated[
        Yes, unsupported("not supported: send token ids to do without them")
    ] = True


_NUMBERS = {"type": "array", "items": {"type": "number"}}


class Embedding(Struct):
    """One of them: numbers, or these in base64, little-endian float32."""

    # Encoded already.
    embedding: Annotated[Raw, Meta(extra_json_schema={"anyOf": [_NUMBERS, {"type": "string"}]})]
    index: int
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """Those of all inputs, in their order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"
