"""`/tokenize` and `/detokenize`: the bodies of requests and of responses, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from client.gateway.schemas.limits import MAX_MESSAGES, AtMost
from client.gateway.schemas.sampling import Fields, NoTemplate


class TokenizeRequest(Fields):
    """A prompt, or messages as of a chat, to be turned into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], AtMost(MAX_MESSAGES, "messages")] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NoTemplate = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Fields):
    """Tokens to be turned into a text."""

    model: str | None = None
    tokens: list[int]


class Tokenized(Struct):
    """The tokens; `token_strs` are their texts, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct):
    """The text."""

    prompt: str
