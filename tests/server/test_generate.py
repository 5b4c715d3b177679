"""Requests that are right, over gRPC and HTTP, in TensorRT-LLM's convention and vLLM's."""

import json
import math

import pytest

from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.caller import Caller

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox 你好 🎉"
LONG = {"sampling_parameters": json.dumps({"ignore_eos": True})}


def test_one_response_unless_streamed_with_the_prompt_before_it(caller: Caller) -> None:
    whole = caller.one(text_input=PROMPT, max_tokens=20)
    bare = caller.one(text_input=PROMPT, max_tokens=20, exclude_input_in_output=True)
    assert set(whole) == set(bare) == {"text_output", "final"}
    assert whole["text_output"] == [PROMPT + bare["text_output"][0]]
    assert bare["text_output"][0]


@pytest.mark.parametrize("seed", range(5))
def test_deltas_join_to_the_whole_text(caller: Caller, seed: int) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 400, "temperature": 1.0, "seed": seed, **LONG}
    whole = caller.one(**inputs, exclude_input_in_output=True)["text_output"][0]
    responses = caller.collect(**inputs, stream=True)
    assert "".join(r["text_output"][0] for r in responses) == whole
    assert len(responses) > 1
    assert not whole.isascii()
    assert ["final" in r for r in responses] == [False] * (len(responses) - 1) + [True]


def test_a_stream_gives_the_prompt_back_only_if_told(caller: Caller) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 5}
    delta = caller.text(**inputs)
    assert caller.text(**inputs, exclude_input_in_output=False) == PROMPT + delta


def test_several_sequences(caller: Caller) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    whole = caller.one(**inputs, num_return_sequences=3, exclude_input_in_output=True)
    assert whole["sequence_index"] == [0, 1, 2]
    assert len(set(whole["text_output"])) == 3
    texts = ["", "", ""]
    for response in caller.collect(**inputs, num_return_sequences=3, stream=True):
        for index, delta in zip(response["sequence_index"], response["text_output"], strict=True):
            texts[index] += delta
    assert texts == whole["text_output"]
    prefixed = caller.one(**inputs, num_return_sequences=3)["text_output"]
    assert prefixed == [PROMPT + text for text in texts]


def test_optional_outputs_come_when_asked_for(caller: Caller) -> None:
    response = caller.one(
        text_input=PROMPT,
        max_tokens=8,
        return_log_probs=True,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_perf_metrics=True,
        **LONG,
    )
    assert response["finish_reason"] == ["length"]
    assert response["num_output_tokens"] == [8]
    assert response["num_input_tokens"] == [len(Tokenizer(byte_level_tokenizer()).encode(PROMPT))]
    assert len(response["output_log_probs"]) == 8
    assert math.isclose(
        sum(response["output_log_probs"]), response["cum_log_probs"][0], rel_tol=1e-5
    )
    times = ["arrival", "first_scheduled", "first_token", "last_token"]
    stamps = [response[f"{name}_time_ns"][0] for name in times]
    assert stamps == sorted(stamps)
    assert "logprobs" not in response


def test_the_finish_reason_of_a_stream_is_none_until_the_end(caller: Caller) -> None:
    responses = caller.collect(
        text_input=PROMPT, max_tokens=30, stream=True, return_finish_reason=True, **LONG
    )
    reasons = [r["finish_reason"][0] for r in responses]
    assert reasons == ["None"] * (len(reasons) - 1) + ["length"]


def test_logprobs(caller: Caller) -> None:
    parameters = json.dumps({"logprobs": 2, "max_tokens": "4", "temperature": "0"})
    responses = caller.collect(
        text_input=PROMPT, sampling_parameters=parameters, stream=True, return_logprobs=True
    )
    positions = [p for r in responses for p in json.loads(r["logprobs"][0])]
    assert len(positions) == 4
    for position in positions:
        ranks = {entry["rank"]: entry["logprob"] for entry in position.values()}
        assert set(ranks) == {1, 2}
        assert 0 >= ranks[1] >= ranks[2]
        for entry in position.values():
            part = {"bytes"} if "\N{REPLACEMENT CHARACTER}" in entry["decoded_token"] else set()
            assert set(entry) == {"logprob", "rank", "decoded_token"} | part


def test_stop_words_cut_the_text_across_tokens(caller: Caller) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 60, "seed": 1, "temperature": 1.0, **LONG}
    whole = caller.text(**inputs)
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    assert caller.text(**inputs, stop_words=["", stop]) == expected
    asked = ("exclude_input_in_output", "return_finish_reason", "return_stop_reason")
    response = caller.one(**inputs, stop_words=["☃", stop], **dict.fromkeys(asked, True))
    assert response["text_output"] == [expected]
    assert response["finish_reason"] == ["stop"]
    assert json.loads(response["stop_reason"][0]) == stop
    assert caller.text(**inputs, stop_words=[""], bad_words=[""]) == whole


def test_an_end_id_ends_it(caller: Caller) -> None:
    parameters = _parameters(max_tokens=9, ignore_eos=True, temperature=0)
    prompt_ids = Tokenizer(byte_level_tokenizer()).encode(PROMPT)
    ids = caller.one("engine", input_ids=prompt_ids, **parameters)["token_ids"]
    response = caller.one(
        text_input=PROMPT, max_tokens=9, end_id=ids[4], return_num_output_tokens=True
    )
    assert response["num_output_tokens"] == [ids.index(ids[4]) + 1]


def test_chat_messages(caller: Caller) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello! 😀"}])
    text = caller.one(messages=messages, max_tokens=10)["text_output"][0]
    prompt = "<|user|>Hello! 😀<|end|><|assistant|>"
    inputs = {"text_input": prompt, "max_tokens": 10, "exclude_input_in_output": True}
    assert text == caller.one(**inputs)["text_output"][0]


def test_chat_messages_as_clients_have_them(caller: Caller) -> None:
    """An answer that said nothing, fields that are null, and content in parts."""
    question = {"role": "user", "content": "Hello! 😀"}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    parts = {"role": "user", "name": None, "content": [{"type": "text", "text": "Hello! 😀"}]}
    texts = [
        caller.one(messages=json.dumps(messages), max_tokens=10)["text_output"]
        for messages in ([question, {**answer, "content": ""}, question], [question, answer, parts])
    ]
    assert texts[0] == texts[1]


def test_vllm_parameters_win_over_inputs_and_may_be_request_parameters(caller: Caller) -> None:
    counted = {"text_input": PROMPT, "return_num_output_tokens": True, "max_tokens": 3}
    parameters = {"max_tokens": 5, "ignore_eos": True}
    assert caller.one(**counted)["num_output_tokens"] == [3]
    assert caller.one(**counted, **_parameters(**parameters))["num_output_tokens"] == [5]
    assert caller.one(**counted, parameters=parameters)["num_output_tokens"] == [5]


def test_the_engine_takes_token_ids(caller: Caller) -> None:
    parameters = _parameters(max_tokens=6, logprobs=0, ignore_eos=True, temperature=0)
    whole = caller.one("engine", input_ids=[5, 6, 7], **parameters)
    assert len(whole["token_ids"]) == whole["num_output_tokens"][0] == 6
    assert whole["finish_reason"] == ["length"]
    assert len(whole["output_log_probs"]) == 6
    assert "detokenizer_input" not in whole
    pieces = caller.collect("engine", input_ids=[5, 6, 7], stream=True, **parameters)
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]


def test_http_generate(caller: Caller) -> None:
    status, body = caller.generate({"text_input": PROMPT, "max_tokens": 6})
    assert status == 200
    assert body["text_output"] == caller.one(text_input=PROMPT, max_tokens=6)["text_output"][0]
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 6, "temperature": 0, "n": 2}}
    status, answer = caller.generate(body)
    assert status == 200
    assert len(answer["text_output"]) == 2


def test_http_generate_stream(caller: Caller) -> None:
    body = {"text_input": [PROMPT], "max_tokens": 30, "stream": True, **LONG}
    events = caller.generate_stream(body)
    assert len(events) > 1
    whole = caller.text(text_input=PROMPT, max_tokens=30, **LONG)
    assert "".join(event["text_output"] for event in events) == whole
    (event,) = caller.generate_stream({"text_input": PROMPT, "max_tokens": 3})
    assert event["text_output"].startswith(PROMPT)


def test_a_deadline_ends_a_request_with_what_it_has(caller: Caller) -> None:
    response = caller.one(
        text_input=PROMPT, max_tokens=450, timeout=50_000, return_finish_reason=True, **LONG
    )
    assert response["finish_reason"] == ["abort"]


def _parameters(**fields: object) -> dict[str, str]:
    return {"sampling_parameters": json.dumps(fields)}


def test_tenant_counts_with_the_servers_key_only(caller: Caller) -> None:
    """Which this server does not have: any name is taken, and is that of the one tenant."""
    asked = {"text_input": "a", "max_tokens": 1, "tenant": "anybody"}
    assert caller.generate(asked)[0] == 200
    status, answer = caller.generate({**asked, "tenant_key": "a-key-of-16-or-more"})
    assert status == 400
    assert "tenant_key: the server has no" in answer["error"]


def test_tenants_with_salts_of_their_own_do_not_see_each_others_prompts(caller: Caller) -> None:
    """By the hits that are reported; a salt comes as JSON, or as a request parameter."""
    prompt = "What only one tenant has ever asked, at a length of several blocks. " * 3

    def reused(salt: str | None = None, *, as_parameter: bool = False) -> int:
        fields = {} if salt is None else {"cache_salt": salt}
        response = caller.one(
            text_input=prompt,
            max_tokens=1,
            return_perf_metrics=True,
            sampling_parameters=json.dumps({} if as_parameter else fields),
            parameters=fields if as_parameter else None,
        )
        (count,) = response["kv_cache_reused_blocks"]
        return int(count)

    assert reused("tenant 1") == 0
    hits = reused("tenant 1")
    assert hits > 2
    assert reused("tenant 2") == reused() == 0
    assert reused("tenant 1", as_parameter=True) == reused() == hits
    status, answer = caller.generate({"text_input": prompt, "cache_salt": ""})
    assert (status, answer["error"].rpartition("cache_salt:")[2]) == (
        400,
        " must be a non-empty string [code=invalid_value param=cache_salt]",
    )
