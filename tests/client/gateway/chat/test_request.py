"""Messages as clients send them back, under the names that the server knows."""

from __future__ import annotations

from typing import Any

import pytest

from client.gateway.chat.request import messages_of
from engine.errors import RequestError
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


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ({"reasoning_content": "h"}, {"content": "", "reasoning_content": "h"}),
        ({"reasoning": "h", "tool_calls": []}, {"content": "", "reasoning_content": "h"}),
        ({"tool_calls": []}, {"content": ""}),
        ({"refusal": "no"}, {"content": "no"}),
    ],
)
def test_an_answer_without_a_text_is_taken_back(
    answer: dict[str, Any], taken: dict[str, Any]
) -> None:
    given = {"role": "assistant", "content": None, **answer}
    assert check_messages(messages_of([given])) == [{"role": "assistant", **taken}]


def test_a_message_without_content_is_none() -> None:
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content: is missing"):
        check_messages(messages_of([{"role": "assistant"}]))
    with pytest.raises(RequestError, match=r"^messages\[0\]\.content: is missing"):
        check_messages(messages_of([{"role": "user", "content": None}]))
