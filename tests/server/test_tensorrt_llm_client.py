"""The ensemble's answers as clients of TensorRT-LLM's backend read them."""

from typing import Any

import numpy as np
import pytest

from engine.launch.model_configs import UNARY
from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.tritonclient_stream import infer_one

pytestmark = pytest.mark.server


def test_texts_have_no_batch_dimension_and_other_outputs_have(
    server: TritonServer, caller: Caller
) -> None:
    result = infer_one(
        server,
        {
            "text_input": "The capital of Italy is",
            "max_tokens": np.int32(5),
            "num_return_sequences": np.int32(2),
            "temperature": np.float32(0),
            "exclude_input_in_output": np.True_,
            "return_log_probs": np.True_,
        },
    )
    fields = {"text_input": "The capital of Italy is", "max_tokens": 5, "temperature": 0.0}
    (expected,) = caller.one(**fields, exclude_input_in_output=True)["text_output"]
    texts = result.as_numpy("text_output")
    assert [texts[i].decode() for i in range(2)] == [expected, expected]
    sums = result.as_numpy("cum_log_probs")
    assert sums[0][0] == sums[0][1] < 0
    assert result.as_numpy("output_log_probs")[0][:5].sum() == pytest.approx(sums[0][0], rel=1e-4)


def test_every_figure_that_it_asks_for_is_there(server: TritonServer) -> None:
    result = infer_one(
        server,
        {
            "text_input": "A prompt that no other test has asked for.",
            "max_tokens": np.int32(20),
            "return_perf_metrics": np.True_,
        },
    )
    figures = {}
    for name in (
        *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
        *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"),
        *("last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens"),
        "total_draft_tokens",
    ):
        found = result.as_numpy(name)
        assert found is not None, name
        figures[name] = found[0][0]
    times = [figures[name] for name in figures if name.endswith("_ns")]
    assert 0 < times[0] <= times[1] <= times[2] <= times[3]
    assert figures["kv_cache_alloc_new_blocks"] == figures["kv_cache_alloc_total_blocks"] > 1
    assert figures["kv_cache_reused_blocks"] == figures["acceptance_rate"] == 0
    assert figures["total_draft_tokens"] == figures["total_accepted_draft_tokens"] == 0


def test_its_engines_names_are_the_engines(caller: Caller) -> None:
    """What `inflight_batcher_llm_client.py` sends to the model `tensorrt_llm`."""
    ids = [5, 6, 7]
    (answer,) = caller.collect(
        "engine",
        input_ids=[*ids, 0, 0],
        input_lengths=3,
        request_output_len=6,
        beam_width=1,
        temperature=1.0,
        runtime_top_k=1,
        runtime_top_p=0.0,
        len_penalty=1.0,
        end_id=-1,
        pad_id=0,
        return_log_probs=True,
        streaming=False,
    )
    parameters = '{"max_tokens": 6, "temperature": 0, "ignore_eos": true, "logprobs": 0}'
    (expected,) = caller.collect("engine", input_ids=ids, sampling_parameters=parameters)
    assert len(answer["token_ids"]) == 6
    assert answer["token_ids"] == expected["token_ids"]
    assert len(answer["output_log_probs"]) == 6


REFUSED = [
    ("engine", {"input_ids": [5], "draft_input_ids": [1]}, "draft_input_ids: not supported"),
    ("engine", {"input_ids": [5], "embedding_bias": [0.5]}, "embedding_bias: not supported"),
    ("ensemble", {"text_input": "a", "prompt_vocab_size": 8}, "prompt_vocab_size: not supported"),
    ("ensemble", {"text_input": "a", "lora_name": "x"}, "lora_name: not supported"),
    (UNARY, {"text_input": "a", "num_draft_tokens": 8}, "num_draft_tokens: not supported"),
]


@pytest.mark.parametrize(("model", "inputs", "text"), REFUSED)
def test_inputs_that_no_stage_takes_are_refused_by_name(
    caller: Caller, model: str, inputs: dict[str, Any], text: str
) -> None:
    """Not by Triton's core, which does not say what to use."""
    with pytest.raises(InferError, match=f"{text} by this version of Trident; [a-z]"):
        caller.one(model, **inputs)
