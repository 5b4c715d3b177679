"""Cancelling a request while steps are in flight affects neither other requests nor blocks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol.messages import AddRequest, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from tests.factories.greedy import SHARED_GPU, GreedyCheckpoint
from tests.factories.outputs import listed

MAX_TOKENS = 24
SETTINGS = {"block_size": 16, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("llama"),
        "LlamaForCausalLM",
        lengths=(5, 60, 33, 17, 80, 2, 49, 64, 20, 31),
        max_tokens=MAX_TOKENS,
        hidden_size=128,
        head_dim=64,
        num_hidden_layers=2,
    )


@pytest.fixture(params=[True, False], ids=["ahead", "synchronous"])
def core(
    request: pytest.FixtureRequest, checkpoint: GreedyCheckpoint, device: torch.device
) -> EngineCore:
    settings = {**SETTINGS, **SHARED_GPU, "device": device.type}
    fields = {"model": str(checkpoint.path), "dtype": "float32", **settings}
    fields["async_scheduling"] = request.param
    return EngineCore(EngineConfig.parse(fields))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 15, 30])
def test_others_are_answered_as_if_it_had_never_been(
    core: EngineCore, checkpoint: GreedyCheckpoint, steps: int
) -> None:
    """Cancelled while waiting, during prefill, and during decode."""
    params: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    for uid, prompt in enumerate(checkpoint.prompts):
        more = {"n": 2, "temperature": 1.0} if uid % 4 == 3 else {}
        core.add_request(AddRequest(uid, pack_token_ids(list(prompt)), {**params, **more}))
    cancelled = set(range(1, len(checkpoint.prompts), 2))
    tokens: dict[int, list[int]] = defaultdict(list)
    ended: dict[tuple[int, int], str] = {}

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sequence = (output.uid, output.index)
            assert sequence not in ended, "an output after the last one"
            tokens[output.uid] += output.token_ids
            if output.finish_reason is not None:
                ended[sequence] = output.finish_reason

    for _ in range(steps):
        take(listed(core.step()))
    running = {uid for uid in cancelled if (uid, 0) not in ended}
    for uid in sorted(running):
        take(listed(core.abort(uid)))
        core.check_integrity()
    while core.has_unfinished_requests():
        take(listed(core.step()))
    core.check_integrity()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
    assert all(ended[uid, 0] == "abort" for uid in running)
    for uid, answer in enumerate(checkpoint.answers):
        if uid not in cancelled:
            assert tokens[uid] == answer.token_ids
        elif uid % 4 == 1:  # greedy: the tokens so far are right
            assert tokens[uid] == answer.token_ids[: len(tokens[uid])]
