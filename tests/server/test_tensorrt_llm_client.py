"""The ensemble's answers as clients of TensorRT-LLM's backend read them."""

import queue
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from engine.launch.server import TritonServer
from tests.server.caller import Caller

pytestmark = pytest.mark.server


def _input(name: str, value: object, dtype: type, kind: str) -> InferInput:
    tensor = InferInput(name, [1, 1], kind)
    tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return tensor


def test_texts_have_no_batch_dimension_and_other_outputs_have(
    server: TritonServer, caller: Caller
) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    inputs = [
        _input("text_input", b"The capital of Italy is", object, "BYTES"),
        _input("max_tokens", 5, np.int32, "INT32"),
        _input("num_return_sequences", 2, np.int32, "INT32"),
        _input("temperature", 0.0, np.float32, "FP32"),
        _input("exclude_input_in_output", True, np.bool_, "BOOL"),
        _input("return_log_probs", True, np.bool_, "BOOL"),
    ]
    with InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs)
        result, error = answers.get(timeout=60)
        client.stop_stream()
    assert error is None
    fields = {"text_input": "The capital of Italy is", "max_tokens": 5, "temperature": 0.0}
    (expected,) = caller.one(**fields, exclude_input_in_output=True)["text_output"]
    texts = result.as_numpy("text_output")
    assert [texts[i].decode() for i in range(2)] == [expected, expected]
    sums = result.as_numpy("cum_log_probs")
    assert sums[0][0] == sums[0][1] < 0
    assert result.as_numpy("output_log_probs")[0][:5].sum() == pytest.approx(sums[0][0], rel=1e-4)
