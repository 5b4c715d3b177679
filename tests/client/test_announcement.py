"""What a server that is ready suggests to ask it."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from client.commands.announcement import curl_line


@pytest.mark.parametrize(
    ("model", "embeds", "field"),
    [
        ("demo", False, "messages"),
        ("/models/a", False, "text_input"),
        ("/models/a", True, "sampling_parameters"),
    ],
)
def test_the_model_can_answer_it(model: str, embeds: bool, field: str) -> None:
    server: Any = SimpleNamespace(
        config=SimpleNamespace(model=model), http_url="localhost:8000", model="ensemble"
    )
    *_, body = shlex.split(curl_line(server, embeds=embeds))
    asked = json.loads(body)
    assert field in asked
    assert ("return_embedding" in body) == embeds == ("max_tokens" not in asked)
