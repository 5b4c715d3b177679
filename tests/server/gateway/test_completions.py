"""`/v1/completions` with OpenAI's own clients."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from client import TridentClient
from engine.launch.server import TritonServer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.gateway.conftest import MODEL, Blocking, Direct

pytestmark = pytest.mark.server

TOKENIZER = byte_level_tokenizer()
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def create(client: Direct | Blocking, prompt: Any, **options: Any) -> Any:
    return client.create("completions", prompt=prompt, **{**GREEDY, **options})


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.fixture(scope="module")
def direct(server: TritonServer) -> Any:
    with TridentClient(server.grpc_url) as client:
        yield lambda prompt, **options: client.generate(
            prompt, **{"temperature": 0, "max_tokens": 12, **options}
        )


def test_an_answer_is_the_servers(client: Direct | Blocking, direct: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, again and again."
    expected = direct(prompt)
    answer = create(client, prompt, user="me")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.text) == (0, expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == expected.num_input_tokens
    assert answer.usage.completion_tokens == expected.num_output_tokens
    assert answer.usage.total_tokens == expected.num_input_tokens + expected.num_output_tokens
    # It has been computed before.
    assert answer.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_stream_is_the_same_answer(client: Direct | Blocking, direct: Any) -> None:
    expected = direct("One two", max_tokens=40)
    chunks = create(client, "One two", max_tokens=40, stream=True)
    assert joined(chunks) == {0: expected.text}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [expected.finish_reason]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_of_a_stream(client: Direct | Blocking) -> None:
    *chunks, last = create(client, "One", stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.prompt_tokens == len(TOKENIZER.encode("One"))
    assert 0 < last.usage.completion_tokens <= 12
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = create(client, "One", stream=True, stream_options=options)
    seen = [chunk.usage.completion_tokens for chunk in counted]
    assert seen == sorted(seen)
    assert seen[-1] == last.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_in_all_forms(client: Direct | Blocking, direct: Any, stream: bool) -> None:
    texts = ["One two", "Stop here", "你好"]
    ids = [TOKENIZER.encode(text) for text in texts]
    expected = {index: direct(text).text for index, text in enumerate(texts)}

    def texts_of(prompt: Any, **options: Any) -> dict[int, str]:
        answer = create(client, prompt, stream=stream, **options)
        return joined(answer if stream else [answer])

    assert texts_of(texts) == texts_of(ids) == expected
    assert texts_of(ids[0]) == texts_of([ids[0]]) == texts_of([texts[0]]) == {0: expected[0]}
    twice = texts_of(texts[:2], n=2)
    assert twice == {0: expected[0], 1: expected[0], 2: expected[1], 3: expected[1]}


def test_usage_of_several_prompts_and_sequences(openai: OpenAI) -> None:
    answer = openai.completions.create(
        model="alias",
        prompt=["One two", "Three"],
        n=3,
        max_tokens=4,
        extra_body={"ignore_eos": 1 > 0},
    )
    assert answer.model == "alias"
    assert len(answer.choices) == 6
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 4
    prompt = len(TOKENIZER.encode("One two")) + len(TOKENIZER.encode("Three"))
    assert answer.usage.prompt_tokens == prompt
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_and_logprobs_are_the_servers(
    client: Direct | Blocking, direct: Any, stream: bool, as_ids: bool
) -> None:
    text = "The quick fox"
    prompt: Any = TOKENIZER.encode(text) if as_ids else text
    expected = direct(text, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    answer = create(
        client, prompt, echo=True, logprobs=2, stream=stream, extra_body={"ignore_eos": True}
    )
    assert joined(answer if stream else [answer]) == {0: text + expected.text}
    found: dict[str, list[Any]] = {}
    for each in answer if stream else [answer]:
        for name, values in each.choices[0].logprobs.model_dump().items():
            found.setdefault(name, []).extend(values)
    positions = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    assert found["token_logprobs"] == [None, *(each.chosen.logprob for each in positions)]
    assert found["tokens"][0] == TOKENIZER.decode(TOKENIZER.encode(text)[:1])
    assert found["tokens"][1:] == [each.chosen.token for each in positions]
    assert found["top_logprobs"][0] is None
    assert [set(top.values()) for top in found["top_logprobs"][1:]] == [
        {each.logprob for each in position.top} for position in positions
    ]
    assert len(found["text_offset"]) == len(positions) + 1
    of_prompt = len(expected.prompt_logprobs) + 1
    starts = found["text_offset"][:of_prompt]
    for token, start in zip(found["tokens"], starts, strict=False):
        assert text[start:].startswith(token)


def test_a_prompt_is_scored_alone(openai: OpenAI, direct: Any) -> None:
    scored = direct("The quick fox", prompt_logprobs=0, max_tokens=0)
    answer = openai.completions.create(
        model=MODEL, prompt="The quick fox", echo=True, logprobs=0, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "The quick fox"
    assert choice.logprobs is not None
    logprobs = [each.chosen.logprob for each in scored.prompt_logprobs]
    assert choice.logprobs.token_logprobs == [None, *logprobs]


def test_extensions_reach_the_engine(openai: OpenAI, direct: Any) -> None:
    def text(prompt: str = "One two", **extensions: Any) -> str:
        body = {"stop": None, **extensions}
        made = openai.completions.create(prompt=prompt, extra_body=body, **GREEDY)
        return made.choices[0].text

    allowed = TOKENIZER.encode("x")
    assert text(allowed_token_ids=allowed) == "x" * 12
    assert text(logit_bias={str(allowed[0]): 100}) == "x" * 12
    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert text(guided_regex="[ab]{3}") in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
    assert text(stop=["x"], allowed_token_ids=allowed) == ""
    assert text(stop="x", include_stop_str_in_output=True, allowed_token_ids=allowed) == "x"
    sampled = {"temperature": 1.0, "top_k": 5, "min_p": 0.01, "seed": 7, "ignore_eos": True}
    assert text(**sampled) == direct("One two", **sampled).text
    as_ids = openai.completions.create(
        prompt="One", logprobs=1, extra_body={"return_tokens_as_token_ids": True}, **GREEDY
    )
    assert as_ids.choices[0].logprobs is not None
    assert as_ids.choices[0].logprobs.tokens is not None
    assert as_ids.choices[0].logprobs.tokens[0].startswith("token_id:")
    found = openai.completions.create(prompt="One", extra_body={"prompt_logprobs": 1}, **GREEDY)
    (choice,) = found.choices
    assert choice.prompt_logprobs[0] is None  # type: ignore[attr-defined]
    length = len(TOKENIZER.encode("One"))
    assert len(choice.prompt_logprobs) == length  # type: ignore[attr-defined]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"unheard_of": 1}, "unheard_of", "unheard_of: unknown field"),
    ({"prompt": 5}, "prompt", "prompt: must be a string, a list"),
    ({"prompt": [1, "a"]}, "prompt[1]", "prompt[1]: is wrong: the field must be a string, a list"),
    ({"prompt": []}, "prompt", "prompt: must not be empty"),
    ({"prompt": ""}, "prompt", "prompt: must not be empty"),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0]: must not be empty"),
    ({"prompt": [[1, 9999]]}, "prompt[0][1]", "prompt[0][1]: token id 9999 is outside"),
    ({"prompt": [2**40]}, "prompt[0]", "prompt[0]: must be a 32-bit integer"),
    ({"prompt": ["a"] * 257}, "prompt", "prompt: must have at most 256"),
    ({"temperature": -1}, "temperature", "temperature: "),
    ({"temperature": "0.5"}, "temperature", "temperature: "),
    ({"n": 0}, "n", "n: "),
    ({"n": 10**9}, "n", "n: "),
    ({"n": True}, "n", "n: "),
    ({"stop": [1]}, "stop[0]", "the field must be a string or a list of strings"),
    ({"suffix": "x"}, "suffix", "suffix: "),
    ({"n": 3, "best_of": 2}, "best_of", "best_of: "),
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search: needs best_of or n above 1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens: must be"),
    ({"logprobs": 21}, "logprobs", "logprobs: "),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only if stream is true"),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        "stream_options.x: unknown field",
    ),
    (
        {"stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
        "is not supported if stream is true",
    ),
    ({"priority": 2**31}, "priority", "priority: "),
    ({"cache_salt": ""}, "cache_salt", "cache_salt: must be a non-empty string"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: must be at least 1"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_is_wrong_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    if stream and "stream_options" in fields and "stream" not in fields:
        pytest.skip("is right in a stream")
    body = {"prompt": "a", "stream": stream, **fields}
    with pytest.raises(BadRequestError) as caught:
        openai.completions.create(model=MODEL, prompt="a", extra_body=body)
    assert text in caught.value.message
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_one_of_several_prompts_is_refused_by_its_place(openai: OpenAI) -> None:
    """Not streamed: a stream that the other has begun ends with an event of the error."""
    with pytest.raises(BadRequestError, match=r"prompt\[1\]: the prompt has ") as caught:
        openai.completions.create(model=MODEL, prompt=["a", "x" * 600])
    assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_both_numbers(openai: OpenAI, stream: bool) -> None:
    ids = TOKENIZER.encode("x" * 600)
    with pytest.raises(BadRequestError) as caught:
        openai.completions.create(model=MODEL, prompt=ids, stream=stream)
    assert f"prompt: the prompt has {len(ids)} tokens" in caught.value.message
    assert f"max_model_len is {MAX_MODEL_LEN}" in caught.value.message
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match=r"max_tokens: 512 and the 1 tokens of prompt exceed"):
        openai.completions.create(model=MODEL, prompt="x", max_tokens=512)


def test_one_wrong_prompt_fails_the_request_and_leaves_nothing(
    openai: OpenAI, server: TritonServer
) -> None:
    with pytest.raises(BadRequestError, match="9999"):
        openai.completions.create(model=MODEL, prompt=[[5]] * 7 + [[9999]], max_tokens=500)
