"""Tools through the gateway: a random model that grammars make write calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tagged import tagged_tokenizer
from tests.factories.tokenizers import save_tokenizer
from tests.server.gateway.conftest import Blocking, Direct
from tests.server.gateway.running import running

pytestmark = pytest.mark.server

USER = {"role": "user", "content": "How warm is it?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop_it", "parameters": {"enum": [{}]}}},
]
# What a model that has learnt it writes.
CALL = (
    r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Rome|Oslo)"\}\}\n</tool_call>'
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("tools")
    tokenizer = tagged_tokenizer(("<tool_call>", "</tool_call>"), "text")
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        f"{{% endfor %}}{tokenizer.chat_template}"
    )
    write_checkpoint(
        folder,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    settings = {
        "model": str(save_tokenizer(tokenizer, folder)),
        "dtype": "float32",
        "num_gpu_blocks_override": 400,
        "tool_call_parser": "hermes",
    }
    with (
        TritonServer(settings, ports=0, start_timeout_s=120) as server,
        running(GatewaySettings(triton_urls=(server.grpc_url,))) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module", params=[Direct, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, address: str) -> Iterator[Direct | Blocking]:
    made = request.param(f"http://{address}/v1")
    yield made
    made.close()


@pytest.fixture(scope="module")
def openai(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: Direct | Blocking, **options: Any) -> Any:
    asked: Any = {"model": "ensemble", "messages": [USER], "tools": TOOLS, "max_tokens": 300}
    return client.create("chat.completions", **{**asked, "seed": 3, **options})


def joined(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Return content, names and arguments of the calls, and the finish reason."""
    content, calls, reason = "", list[list[str]](), ""
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for each in choice.delta.tool_calls or ():
                if each.id:
                    assert each.type == "function"
                    assert each.index == len(calls)
                    calls.append([each.function.name, ""])
                calls[each.index][1] += each.function.arguments
            reason = choice.finish_reason or reason
    return content, calls, reason


def whole(answer: Any) -> tuple[str, list[list[str]], str]:
    (choice,) = answer.choices
    calls = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("times", [1, 2])
def test_calls_between_the_models_tags(client: Direct | Blocking, times: int) -> None:
    body = {"structured_outputs": {"regex": "I will[.]\n" + "\n".join([CALL] * times)}}
    answer = create(client, extra_body=body)
    content, calls, reason = whole(answer)
    assert (content, reason, len(calls)) == ("I will.", "tool_calls", times)
    for name, arguments in calls:
        assert name == "get_weather"
        assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert joined(create(client, extra_body=body, stream=True)) == (content, calls, reason)


def test_a_conversation(client: Direct | Blocking) -> None:
    """The answer with its call goes back as it came, with the tool's result."""
    answer = create(client, extra_body={"structured_outputs": {"regex": CALL}})
    message = answer.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    again = create(client, messages=[USER, message.model_dump(), result], max_tokens=5)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_call_that_is_cut_off_ends_with_length(client: Direct | Blocking) -> None:
    body = {"structured_outputs": {"regex": CALL}}
    length = create(client, extra_body=body).usage.completion_tokens
    content, calls, reason = whole(create(client, extra_body=body, max_tokens=length - 25))
    assert reason == "length"
    assert content == ""
    assert [name for name, _ in calls] == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [None, False])
def test_required_is_enforced(
    client: Direct | Blocking, stream: bool, parallel: bool | None
) -> None:
    options: dict[str, Any] = {} if parallel is None else {"parallel_tool_calls": parallel}
    blanks = {str(token_id): -100 for token_id in (tagged_blanks())}
    answer = create(client, tool_choice="required", stream=stream, logit_bias=blanks, **options)
    content, calls, reason = joined(answer) if stream else whole(answer)
    assert content == ""
    assert calls
    if parallel is False:
        assert len(calls) == 1
        assert reason == "tool_calls"
    for name, arguments in calls[: 1 if reason == "length" else None]:
        assert name in ("get_weather", "stop_it")
        if name == "get_weather" and reason != "length":
            assert json.loads(arguments).keys() == {"city", "days"}


def tagged_blanks() -> list[int]:
    ids: list[int] = tagged_tokenizer(("<tool_call>", "</tool_call>"), "text").encode("\n\t\r ")
    return ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_is_named_is_called(client: Direct | Blocking, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    blanks = {str(token_id): -100 for token_id in tagged_blanks()}
    answer = create(client, tool_choice=choice, stream=stream, logit_bias=blanks)
    content, calls, reason = joined(answer) if stream else whole(answer)
    assert (content, reason) == ("", "tool_calls")
    ((name, arguments),) = calls
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_without_a_choice_tags_are_text(client: Direct | Blocking) -> None:
    body = {"structured_outputs": {"regex": CALL}}
    content, calls, reason = whole(create(client, tool_choice="none", extra_body=body))
    assert content.startswith("<tool_call>")
    assert content.endswith("</tool_call>")
    assert (calls, reason) == ([], "stop")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": None, "tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "twice"),
    ({"tool_choice": "always"}, "tool_choice", "tool_choice: "),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "one of tools",
    ),
    (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "not together",
    ),
]


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_is_wrong_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, text: str
) -> None:
    body: Any = {"messages": [USER], "tools": TOOLS, **fields}
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(model="ensemble", messages=[], extra_body=body)
    assert text in caught.value.message
    assert str(caught.value.param).startswith(param)
