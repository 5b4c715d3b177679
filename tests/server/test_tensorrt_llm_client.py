"""The ensemble's answers as clients of TensorRT-LLM's backend read them."""

import numpy as np
import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller
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
