"""Hostile requests to a server whose head is the integers of a GGUF file, beside good streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch

from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import runs_panels
from tests.factories.gguf_files import write_gguf
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.server.caller import Caller, InferError
from tests.server.release import released_all
from tests.server.scraping import assert_idle

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runs_panels(torch.bfloat16), reason="our kernels are not for this CPU"),
]

VOCAB_SIZE = 403  # no multiple of a block, nor of a panel
PROMPTS = [[(7 * i + i // 3 + seed) % 400 for i in range(5 + seed)] for seed in range(32)]
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"input_ids": [VOCAB_SIZE]}, {}, "input_ids[0]: token id 403 is outside the vocabulary"),
    ({"input_ids": [-1]}, {}, "input_ids[0]: token id -1 is outside the vocabulary"),
    ({"input_ids": [5] * 300}, {}, "input_ids: "),
    ({}, {"logit_bias": {str(VOCAB_SIZE): 1.0}}, "logit_bias: token id 403 is outside"),
    ({}, {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids[0]: token id 403 is outside"),
    ({}, {"logprobs": 1000}, "logprobs: must be at most "),
    ({}, {"guided_regex": "(?=a)b"}, "guided_regex: "),
]
GOOD: list[dict[str, Any]] = [
    {"top_k": 10**6, "temperature": 1.0, "seed": 1},
    {"logit_bias": {str(VOCAB_SIZE - 1): 100.0}},
    {"prompt_logprobs": 5},
    {"n": 8, "logprobs": 5, "temperature": 1.0, "seed": 2},
    {"guided_regex": "[a-c]{7}", "ignore_eos": False},
]


# The head's type comes first.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("Q8_0",), marks=pytest.mark.large, id="Q8_0"),
        pytest.param(("Q6_K", "Q4_K"), id="Q6_K,Q4_K"),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("gguf")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    write_checkpoint(
        folder / "plain", vocab_size=VOCAB_SIZE, initializer_range=0.1, eos_token_id=2, **sizes
    )
    save_tokenizer(byte_level_tokenizer(), folder / "plain")
    write_gguf(folder / "x.gguf", folder / "plain", request.param)
    settings = {
        "model": str(folder / "x.gguf"),
        "dtype": "bfloat16",
        "deterministic": True,  # whatever is in a step with a sequence
        "max_num_seqs": 40,  # fewer than there are: some wait
        "max_model_len": 128,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with TritonServer(settings, ports=0, start_timeout_s=120) as server:
            yield server
        assert released_all(server)


@pytest.fixture
def engine(server: TritonServer) -> Iterator[Caller]:
    with closing(Caller(server.grpc_url, server.http_url, model="engine")) as caller:
        yield caller


def _inputs(given: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, **params}
    return {"input_ids": PROMPTS[0], "sampling_parameters": json.dumps(fields), **given}


def _tokens(engine: Caller, prompt: list[int]) -> list[int]:
    responses = engine.collect(stream=True, **_inputs({"input_ids": prompt}, {}))
    return [token for response in responses for token in response.get("token_ids", [])]


def _refused(engine: Caller, case: tuple[dict[str, Any], dict[str, Any], str]) -> None:
    given, params, message = case
    with pytest.raises(InferError) as caught:
        engine.collect(**_inputs(given, params))
    assert message in str(caught.value)


def _cancelled(engine: Caller, num_responses: int) -> None:
    stream = engine.stream(stream=True, **_inputs({}, {"n": 8, "max_tokens": 100}))
    list(islice(stream, num_responses))  # or all there are: a response may carry several tokens
    del stream  # which closes it


def test_they_harm_no_stream_beside_them(server: TritonServer, engine: Caller) -> None:
    alone = [_tokens(engine, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) > 16
    with ThreadPoolExecutor(64) as pool:
        streams = [pool.submit(_tokens, engine, prompt) for prompt in PROMPTS]
        others: list[Future[Any]] = [pool.submit(_refused, engine, case) for case in BAD]
        others += [pool.submit(_cancelled, engine, count) for count in (1, 2, 20)]
        others += [pool.submit(engine.collect, **_inputs({}, params)) for params in GOOD]
        found = [stream.result() for stream in streams]
        for other in others:
            other.result()
    assert found == alone
    assert_idle(server)
    assert "Traceback" not in server.log
