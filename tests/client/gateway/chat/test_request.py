"""Messages as clients send them back, under the names that the server knows."""

from __future__ import annotations

from typing import Any

import pytest

from client.gateway.chat.request import messages_of
from engine.text.chat_template import check_messages

ANSWER = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"refusal": None, "annotations": [], "audio": None, "function_call": None}, {}),
        ({"parsed": None, "tool_calls": []}, {}),
        ({"thinking_blocks": [], "reasoning_details": []}, {}),
        ({"parsed": {"x": 1}}, {}),
        (
            {"reasoning": "h", "reasoning_details": [{"type": "reasoning.text", "text": "h"}]},
            {"reasoning_content": "h"},
        ),
        (
            {
                "reasoning_content": "h",
                "thinking_blocks": [{"type": "thinking", "thinking": "h"}],
                "provider_specific_fields": {"thinking_blocks": None},
            },
            {"reasoning_content": "h"},
        ),
    ],
)
def test_an_answer_is_taken_back_as_clients_have_it(
    more: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert check_messages(messages_of([{**ANSWER, **more}])) == [{**ANSWER, **kept}]
