"""Of a body with very many faults the first is told, and the others are not looked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from client.gateway.errors import fault_of
from client.gateway.schemas.chat import ChatRequest
from client.gateway.schemas.completions import CompletionRequest
from client.gateway.schemas.embeddings import EmbeddingsRequest
from client.gateway.schemas.messages import MessagesRequest
from client.gateway.schemas.response_request import ResponseRequest
from client.gateway.schemas.sampling import Fields
from client.gateway.schemas.tokens import DetokenizeRequest

MANY = 1000
USER = {"role": "user", "content": "a"}
CHAT = {"messages": [USER]}
MESSAGES = {"model": "m", "max_tokens": 1}


def numbered(value: Any, numbers: Iterable[int] = range(MANY)) -> dict[str, Any]:
    return {str(number): value for number in numbers}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (EmbeddingsRequest, {"input": [1, 2, *["a"] * MANY]}, "input[2]"),
        (EmbeddingsRequest, {"input": [["a"]] * MANY}, "input[0][0]"),
        (CompletionRequest, {"prompt": [None] * MANY}, "prompt[0]"),
        (CompletionRequest, {"prompt": "a", "stop": ["a", *range(200)]}, "stop[1]"),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        (CompletionRequest, {"prompt": "a", "logit_bias": numbered("x")}, "logit_bias.0"),
        (CompletionRequest, {"prompt": "a", **numbered(1)}, "0"),
        (ChatRequest, {"messages": [USER, *range(MANY)]}, "messages[1]"),
        (ChatRequest, {**CHAT, "metadata": numbered(1)}, "metadata.0"),
        (ChatRequest, {**CHAT, "stream_options": numbered(1)}, "stream_options.0"),
        (ResponseRequest, {"input": [USER, *[{}] * MANY]}, "input[1]"),
        (
            ResponseRequest,
            {"input": [{"role": "user", "content": [{}] * MANY}]},
            "input[0].content[0]",
        ),
        (ResponseRequest, {"input": "a", "metadata": numbered(1, range(16))}, "metadata.0"),
        (ResponseRequest, {"input": "a", "tools": [{}] * MANY}, "tools[0]"),
        (MessagesRequest, {**MESSAGES, "messages": [USER, *range(MANY)]}, "messages[1]"),
        (
            MessagesRequest,
            {**MESSAGES, "messages": [{"role": "user", "content": [{}] * MANY}]},
            "messages[0].content[0]",
        ),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}, "tokens[0]"),
    ],
)
def test_one_fault_is_told(kind: type[Fields], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert fault_of(caught.value.errors()).param == param
    assert caught.value.error_count() == 1
