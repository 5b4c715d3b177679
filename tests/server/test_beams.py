"""Beam search over the wire: transformers' outputs, in each way of asking for it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from client import TridentClient
from engine.launch.server import TritonServer
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.caller import Caller, InferError
from tests.server.tritonclient_stream import infer_one

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

TOKENIZER = Tokenizer(byte_level_tokenizer())
PROMPT = "The quick brown fox jumps over 你好 🎉 and the lazy dog. " * 2
WIDTH, MAX_TOKENS, PENALTY = 4, 20, 0.5


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[list[str], list[float]]:
    """Transformers' texts, and the sums of their log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = TOKENIZER.encode(PROMPT)
    found: Any = model.generate(
        torch.tensor([prompt]),
        GenerationConfig(
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=MAX_TOKENS,
            length_penalty=PENALTY,
            early_stopping=True,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    assert all(len(row) == MAX_TOKENS for row in rows)
    texts = [TOKENIZER.decode(row) for row in rows]
    return texts, [score * MAX_TOKENS**PENALTY for score in found.sequences_scores.tolist()]


INPUTS: dict[str, Any] = {
    "text_input": PROMPT,
    "max_tokens": MAX_TOKENS,
    "end_id": -1,
    "exclude_input_in_output": True,
    "length_penalty": PENALTY,
    "early_stopping": True,
    "return_log_probs": True,
}


def test_all_beams_come_in_one_response(
    caller: Caller, expected: tuple[list[str], list[float]]
) -> None:
    response = caller.one(**INPUTS, beam_width=WIDTH, return_num_output_tokens=True)
    assert response["text_output"] == expected[0]
    assert response["cum_log_probs"] == pytest.approx(expected[1], abs=1e-2)
    assert response["sequence_index"] == list(range(WIDTH))
    assert response["num_output_tokens"] == [MAX_TOKENS] * WIDTH


def test_one_output_is_streamed_as_it_is_settled(
    caller: Caller, expected: tuple[list[str], list[float]]
) -> None:
    inputs = {**INPUTS, "beam_width": WIDTH, "num_return_sequences": 1, "stream": True}
    inputs["return_finish_reason"] = True
    responses = caller.collect(**inputs)
    assert "".join(response["text_output"][0] for response in responses) == expected[0][0]
    assert len(responses) > 1
    assert responses[-1]["finish_reason"] == ["length"]


def test_in_vllms_words_over_tritonclient(
    server: TritonServer, expected: tuple[list[str], list[float]]
) -> None:
    fields = {
        "use_beam_search": True,
        "best_of": WIDTH,
        "n": 2,
        "length_penalty": PENALTY,
        "early_stopping": "true",
        "max_tokens": str(MAX_TOKENS),
        "ignore_eos": True,
    }
    result = infer_one(server, {"text_input": PROMPT, "sampling_parameters": json.dumps(fields)})
    found = [text.decode() for text in result.as_numpy("text_output").reshape(-1)]
    assert found == [PROMPT + text for text in expected[0][:2]]


def test_over_our_client_and_http(
    server: TritonServer, caller: Caller, expected: tuple[list[str], list[float]]
) -> None:
    with TridentClient(server.grpc_url) as client:
        completion = client.generate(
            PROMPT,
            beam_width=WIDTH,
            n=3,
            max_tokens=MAX_TOKENS,
            length_penalty=PENALTY,
            early_stopping=True,
            ignore_eos=True,
        )
        assert [output.text for output in completion.outputs] == expected[0][:3]
        best = client.generate(PROMPT, n=2, best_of=6, seed=1, temperature=1.0, max_tokens=8)
        assert len(best.outputs) == 2
    status, answer = caller.generate({**INPUTS, "beam_width": WIDTH, "num_return_sequences": 1})
    assert (status, answer["text_output"]) == (200, expected[0][0])


def test_many_searches_beside_streams_some_of_which_leave(
    caller: Caller, expected: tuple[list[str], list[float]]
) -> None:
    def search(index: int) -> None:
        stream = index % 2 == 1
        inputs = {**INPUTS, "beam_width": WIDTH, "num_return_sequences": 1, "stream": stream}
        if index % 4 == 3:
            responses = caller.stream(**{**inputs, "max_tokens": 200})
            next(responses)
            responses.close()  # type: ignore[attr-defined]
            return
        text = "".join(response["text_output"][0] for response in caller.collect(**inputs))
        assert text == expected[0][0]

    def plain(index: int) -> None:
        caller.collect(text_input=PROMPT[index:], max_tokens=40, stream=True)

    with ThreadPoolExecutor(24) as threads:
        found = [threads.submit(job, index) for index in range(12) for job in (search, plain)]
        for each in found:
            each.result()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"beam_width": 0}, "beam_width: Input should be greater than or equal to 1"),
        ({"beam_width": 2, "num_return_sequences": 3}, "num_return_sequences: must not exceed"),
        ({"beam_width": 2, "stop_words": ["a"]}, "stop_words: is not supported with beam_width"),
        ({"length_penalty": float("inf")}, "length_penalty: Input should be a finite number"),
    ],
)
def test_what_is_wrong_is_named(caller: Caller, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=message):
        caller.collect(text_input=PROMPT, **inputs)
