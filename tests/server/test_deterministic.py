"""With `deterministic` an answer has the same bytes alone, in company, and after a restart."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.launch.server import TritonServer
from tests.factories.forms import runs_panels
from tests.server.caller import Caller

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not runs_panels(torch.bfloat16),
        reason="this CPU has no products of ours, or the kernels are not built",
    ),
]

PROMPTS = [f"{'Tell me again. ' * (i % 9)}Story {i}: 你好" for i in range(24)]


@contextmanager
def serving(checkpoint: Path, **settings: Any) -> Iterator[Caller]:
    settings = {"model": str(checkpoint), "dtype": "bfloat16", "deterministic": True, **settings}
    with (
        TritonServer(settings, ports=0, start_timeout_s=120) as server,
        closing(Caller(server.grpc_url, server.http_url)) as caller,
    ):
        yield caller


def answer(caller: Caller, index: int) -> dict[str, Any]:
    """Return all outputs; every second request draws with the seed of the settings."""
    parameters = {
        "temperature": 1.0 if index % 2 else 0.0,
        "max_tokens": 12 + index % 7,
        "ignore_eos": True,
        "logprobs": 3,
    }
    text = json.dumps(parameters)
    return caller.one(text_input=PROMPTS[index], sampling_parameters=text, return_logprobs=True)


def test_the_same_request_gets_the_same_bytes(checkpoint: Path) -> None:
    indices = range(len(PROMPTS))
    with serving(checkpoint) as caller:
        alone = [answer(caller, index) for index in indices]
    assert len({repr(each) for each in alone}) == len(PROMPTS)
    # Another process, with other blocks, few of them, and prompts in chunks.
    limits = {
        "block_size": 32,
        "num_gpu_blocks_override": 25,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
    }
    with serving(checkpoint, **limits) as caller, ThreadPoolExecutor(24) as pool:
        for round_ in range(2):
            order = random.Random(round_).sample(indices, len(indices))
            together = dict(zip(order, pool.map(lambda i: answer(caller, i), order), strict=True))
            assert [together[index] for index in indices] == alone
