"""Log-probabilities of prompts over the wire: those of transformers, in both conventions."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from client import TridentClient
from engine.launch.server import TritonServer
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.caller import Caller, InferError
from tests.server.tritonclient_stream import infer_one

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

PROMPT = "The quick brown fox jumps over 你好 🎉 and the lazy dog. " * 4
TOLERANCE = 2e-3
TOKENIZER = Tokenizer(byte_level_tokenizer())
PROMPT_IDS = TOKENIZER.encode(PROMPT)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> torch.Tensor:
    """Transformers' log-probabilities of what follows each token of the prompt, [P, V]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT_IDS])).logits[0].log_softmax(dim=-1)


def sampling(**fields: object) -> dict[str, str]:
    return {"sampling_parameters": json.dumps({"temperature": 0, "ignore_eos": True, **fields})}


def check(content: str, reference: torch.Tensor, num_top: int) -> None:
    first, *positions = json.loads(content)
    assert first is None
    assert len(positions) == len(PROMPT_IDS) - 1
    for position, token_id, expected in zip(positions, PROMPT_IDS[1:], reference, strict=False):
        assert next(iter(position)) == str(token_id)
        assert position[str(token_id)]["decoded_token"] == TOKENIZER.token_text(token_id)
        assert len(position) in (num_top, num_top + 1)
        for other, entry in position.items():
            assert abs(entry["logprob"] - float(expected[int(other)])) < TOLERANCE
        ranks = {entry["rank"] for entry in position.values()}
        assert ranks >= set(range(1, num_top + 1))


@pytest.mark.parametrize("stream", [False, True])
def test_they_come_with_the_first_response(
    caller: Caller, reference: torch.Tensor, stream: bool
) -> None:
    responses = caller.collect(
        text_input=PROMPT, max_tokens=8, stream=stream, **sampling(prompt_logprobs=2)
    )
    assert ["prompt_logprobs" in response for response in responses] == [
        index == 0 for index in range(len(responses))
    ]
    assert (len(responses) > 1) == stream
    (content,) = responses[0]["prompt_logprobs"]
    check(content, reference, 2)


def test_they_are_numbers_in_tensorrt_llms_convention(
    caller: Caller, reference: torch.Tensor
) -> None:
    fields = sampling(prompt_logprobs=0)
    response = caller.one(text_input=PROMPT, max_tokens=2, return_log_probs=True, **fields)
    expected = reference[:-1].gather(-1, torch.tensor(PROMPT_IDS[1:])[:, None])[:, 0]
    assert response["prompt_log_probs"] == pytest.approx(expected.tolist(), abs=TOLERANCE)
    assert len(response["output_log_probs"]) == 2
    direct = caller.one("engine", input_ids=PROMPT_IDS, **sampling(max_tokens=2, prompt_logprobs=0))
    assert direct["prompt_log_probs"] == pytest.approx(response["prompt_log_probs"], abs=1e-4)


def test_echo_with_logprobs_is_that_of_completions(caller: Caller, reference: torch.Tensor) -> None:
    """What lm-evaluation-harness sends: score the prompt, generate nothing."""
    response = caller.one(
        text_input=PROMPT,
        return_num_output_tokens=True,
        return_finish_reason=True,
        **sampling(echo=True, logprobs=1, max_tokens=0),
    )
    assert response["text_output"] == [PROMPT]
    assert response["num_output_tokens"] == [0]
    assert response["finish_reason"] == ["length"]
    assert "logprobs" not in response
    check(response["prompt_logprobs"][0], reference, 1)


def test_over_http(caller: Caller, reference: torch.Tensor) -> None:
    body = {"text_input": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    status, answer = caller.generate(body)
    assert status == 200
    assert answer["text_output"] == PROMPT
    check(answer["prompt_logprobs"], reference, 2)
    events = caller.generate_stream({**body, "max_tokens": 5, "stream": True})
    assert "".join(event["text_output"] for event in events).startswith(PROMPT)
    check(events[0]["prompt_logprobs"], reference, 2)
    assert not any("prompt_logprobs" in event for event in events[1:])


def test_over_tritonclients_grpc_stream(server: TritonServer, reference: torch.Tensor) -> None:
    result = infer_one(server, {"text_input": PROMPT, **sampling(prompt_logprobs=1, max_tokens=3)})
    check(result.as_numpy("prompt_logprobs").reshape(-1)[0].decode(), reference, 1)


def test_over_our_client(server: TritonServer, reference: torch.Tensor) -> None:
    with TridentClient(server.grpc_url) as client:
        completion = client.generate(PROMPT, prompt_logprobs=0, max_tokens=0)
    assert completion.prompt_logprobs is not None
    assert (completion.text, completion.num_output_tokens) == ("", 0)
    assert [each.chosen.token_id for each in completion.prompt_logprobs] == PROMPT_IDS[1:]
    found = [each.chosen.logprob for each in completion.prompt_logprobs]
    expected = reference[:-1].gather(-1, torch.tensor(PROMPT_IDS[1:])[:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_siblings_have_them_once(caller: Caller, reference: torch.Tensor) -> None:
    fields = {"prompt_logprobs": 1, "n": 3, "temperature": 1.0, "seed": 1}
    response = caller.one(text_input=PROMPT, max_tokens=4, **sampling(**fields))
    assert response["sequence_index"] == [0, 1, 2]
    (content,) = response["prompt_logprobs"]
    check(content, reference, 1)


def test_many_at_once_beside_other_streams(caller: Caller, reference: torch.Tensor) -> None:
    """Chunks of several prompts share steps."""
    asked = [
        {"text_input": PROMPT, "max_tokens": 40, **sampling(prompt_logprobs=1)},
        {"text_input": PROMPT + "!", "max_tokens": 60, **sampling()},
    ] * 6
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda inputs: caller.collect(stream=True, **inputs), asked))
    for first, *later in answers[::2]:
        check(first["prompt_logprobs"][0], reference, 1)
        assert not any("prompt_logprobs" in response for response in later)
    for responses in answers[1::2]:
        assert not any("prompt_logprobs" in response for response in responses)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (sampling(prompt_logprobs=21), r"prompt_logprobs: must be at most .* 20 \(got 21\)"),
        (sampling(prompt_logprobs=-1), "prompt_logprobs: Input should be greater than or equal"),
        (sampling(prompt_logprobs="all"), "prompt_logprobs: Input should be a valid integer"),
        (sampling(max_tokens=0), "max_tokens: must be at least 1 without prompt_logprobs"),
        (sampling(max_tokens=0, echo=True), "max_tokens: must be at least 1 without prompt_logp"),
        (sampling(echo=1), "echo: must be true or false"),
        ({"return_context_logits": True}, "return_context_logits: logits are not returned"),
        ({"return_generation_logits": True}, "return_generation_logits: logits are not returned"),
    ],
)
def test_what_is_wrong_is_named(caller: Caller, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=message):
        caller.collect(text_input=PROMPT, **inputs)
