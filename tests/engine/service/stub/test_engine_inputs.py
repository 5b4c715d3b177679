"""The inputs of a client that calls the engine itself, in TensorRT-LLM's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError, UnsupportedError
from engine.protocol.messages import Ready
from engine.service.sampling_inputs import REFUSED
from engine.service.stub.engine_inputs import EngineInputs, parse_engine_inputs

READY = Ready(
    max_model_len=64,
    vocab_size=100,
    num_blocks=8,
    block_size=16,
    kv_cache_tokens=128,
    max_num_seqs=4,
    description="",
)
IDS = np.array([[5, 6, 7, 0, 0]], dtype=np.int32)


def i32(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)


def f32(value: float) -> np.ndarray:
    return np.array([[value]], dtype=np.float32)


def flag(value: bool) -> np.ndarray:
    return np.array([[value]])


def parse(**tensors: np.ndarray) -> EngineInputs:
    return parse_engine_inputs({"input_ids": IDS, **tensors}, {}, 0, READY)


def params(**tensors: np.ndarray) -> dict[str, Any]:
    return dict(parse(**tensors).request.sampling_params)


def test_names_of_tensorrt_llm_are_sampling_parameters() -> None:
    assert params(
        request_output_len=i32(9),
        runtime_top_k=i32(3),
        runtime_top_p=f32(0.5),
        temperature=f32(0.5),
        repetition_penalty=f32(1.5),
        seed=np.array([[3]], dtype=np.uint64),
        return_log_probs=flag(True),
    ) == {
        "max_tokens": 9,
        "top_k": 3,
        "top_p": 0.5,
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "seed": 3,
        "logprobs": 0,
    }


def test_input_lengths_cuts_padding() -> None:
    assert parse(input_lengths=i32(3)).request.prompt_token_ids.tolist() == [5, 6, 7]
    for length in (0, 6):
        with pytest.raises(RequestError, match=r"^input_lengths: must be 1 to the 5 tokens"):
            parse(input_lengths=i32(length))


def test_end_id_is_the_only_end() -> None:
    found = params(end_id=i32(7), pad_id=i32(0))
    assert (found["ignore_eos"], found["stop_token_ids"]) == (True, (7,))
    assert params(end_id=i32(-1)) == {"ignore_eos": True}
    with pytest.raises(RequestError, match=r"^end_id: .*100"):
        parse(end_id=i32(100))


@pytest.mark.parametrize("streaming", [True, False])
def test_streaming_is_stream(streaming: bool) -> None:
    assert parse(streaming=flag(streaming)).request.stream is streaming


def test_guided_decoding_is_structured_output() -> None:
    kind = np.array([[b"regex"]], dtype=object)
    guide = np.array([[b"[0-9]+"]], dtype=object)
    found = params(guided_decoding_guide_type=kind, guided_decoding_guide=guide)
    assert "[0-9]+" in str(found["structured_outputs"])


def test_errors_use_the_names_that_the_client_used() -> None:
    with pytest.raises(RequestError, match=r"^request_output_len: "):
        parse(request_output_len=i32(-1))
    with pytest.raises(RequestError, match=r"^runtime_top_p: "):
        parse(runtime_top_p=f32(2))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_does_not_take_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}: not supported by this .*; [a-z]"):
        parse(**{name: i32(1)})


def test_the_prompt_before_the_output_is_the_ensembles() -> None:
    parse(exclude_input_in_output=flag(True))
    with pytest.raises(UnsupportedError, match=r"^exclude_input_in_output: .*call the ensemble"):
        parse(exclude_input_in_output=flag(False))
