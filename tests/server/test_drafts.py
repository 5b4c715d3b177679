"""Guessed tokens through the real server: the same text, told in figures and metrics."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.launch.server import TritonServer
from tests.server.caller import Caller
from tests.server.scraping import Change, assert_idle
from tests.server.tritonclient_stream import infer_one

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 1}
PROMPT = "to be or not to be, to be or not to be, to be"


@pytest.mark.server
def test_guesses_change_no_text_and_are_counted(checkpoint: Path) -> None:
    settings = {"model": str(checkpoint), "dtype": "float32"}
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [result] = LLM(**settings).generate(PROMPT, sampling, use_tqdm=False)
    settings["speculative_config"] = json.dumps(NGRAM)
    inputs = {"text_input": PROMPT, "exclude_input_in_output": True}
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    inputs["sampling_parameters"] = json.dumps(params)
    with (
        TritonServer(settings, ports=0, start_timeout_s=120) as server,
        closing(Caller(server.grpc_url, server.http_url)) as caller,
    ):
        change = Change(server)
        streamed = caller.collect(**inputs, stream=True)
        assert "".join(each["text_output"][0] for each in streamed) == result.outputs[0].text
        found = infer_one(server, {**inputs, "return_perf_metrics": np.True_})
        assert found.as_numpy("text_output")[0].decode() == result.outputs[0].text
        drafted, accepted, rate = (
            found.as_numpy(name)[0][0]
            for name in ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")
        )
        assert 0 < accepted <= drafted
        assert rate == pytest.approx(accepted / drafted)
        seen = change.becomes(
            generation_tokens_total=2 * 60,
            spec_decode_num_draft_tokens_total=2 * drafted,
            spec_decode_num_accepted_tokens_total=2 * accepted,
        )
        assert 0 < seen["spec_decode_num_drafts_total"] <= 2 * drafted
        assert seen["inter_token_latency_seconds_count"] == 2 * 59
        assert_idle(server)
