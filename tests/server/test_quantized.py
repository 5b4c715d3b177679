"""Quantised checkpoints through the real server: the greedy tokens of the weights that they are."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.launch.errors import ServerStartError
from engine.launch.server import TritonServer
from tests.factories.forms import quantizes
from tests.factories.quantized import change_config, write_quantized
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.server.caller import Caller
from tests.server.release import released_all

MAX_TOKENS = 16
PROMPTS = [[(7 * i + i // 3 + seed) % 400 for i in range(5 + 9 * seed)] for seed in range(6)]
SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS}

# A format through the server in every run; the others repeat what it shows.
FORMATS = [
    "bitsandbytes-nf4",
    *(
        pytest.param(name, marks=pytest.mark.large)
        for name in (
            *("bitsandbytes-nf4-nested", "bitsandbytes-fp4", "modelopt-fp8", "modelopt-nvfp4"),
            *("compressed-nvfp4", "awq", "gptq-4", "fp8-blocks", "compressed-w4a16"),
        )
    ),
]


def _served(settings: dict[str, Any]) -> list[list[int]]:
    """Return the tokens that a server answers to all prompts, sent at once."""
    settings = {**settings, "block_size": 4, "max_num_seqs": 4, "max_model_len": 100}
    with (
        TritonServer(settings, ports=0, start_timeout_s=120) as server,
        closing(Caller(server.grpc_url, server.http_url, model="engine")) as caller,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):

        def ask(prompt: list[int]) -> list[int]:
            given = {"input_ids": prompt, "sampling_parameters": json.dumps(SAMPLING)}
            found: list[int] = caller.one(**given)["token_ids"]
            return found

        found = list(pool.map(ask, PROMPTS))
    assert released_all(server)
    return found


def _offline(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(str(folder), max_model_len=100, **settings)
    params = SamplingParams(**SAMPLING)
    return [
        llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS
    ]


@pytest.mark.server
@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_of_the_weights(name: str, tmp_path: Path) -> None:
    plain, quantized = write_quantized(name, tmp_path, vocab_size=400)
    for folder in (plain, quantized):
        save_tokenizer(byte_level_tokenizer(), folder)
    expected = _offline(plain, dtype="float32")
    assert len({tuple(answer) for answer in expected}) > 3
    assert _served({"model": str(quantized), "dtype": "float32"}) == expected


@pytest.mark.server
@pytest.mark.large
def test_4_bits_while_loading(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int4"}
    if not quantizes(torch.bfloat16, "int4"):
        pytest.skip("our kernels are not for this CPU")
    plain, _ = write_quantized("awq", tmp_path, vocab_size=400)
    save_tokenizer(byte_level_tokenizer(), plain)
    settings["deterministic"] = True  # whatever is in a step with a sequence
    assert _served({"model": str(plain), **settings}) == _offline(plain, **settings)


@pytest.mark.server
@pytest.mark.large
def test_what_is_not_read_ends_the_start(tmp_path: Path) -> None:
    _, quantized = write_quantized("modelopt-nvfp4", tmp_path, vocab_size=400)
    save_tokenizer(byte_level_tokenizer(), quantized)
    change_config(quantized, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8"})
    with pytest.raises(ServerStartError, match="quant_algo: 'W4A8' is not supported; only FP8 and"):
        TritonServer({"model": str(quantized)}, ports=0).start()
