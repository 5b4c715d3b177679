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
