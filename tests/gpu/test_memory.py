"""An engine stays within its share of the GPU, whatever its requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol.messages import AddRequest
from engine.protocol.step_outputs import StepOutputs
from engine.protocol.token_ids import pack_token_ids
from tests.factories.greedy import SHARED_GPU, GreedyCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARE = 0.08


def test_graphs_steps_and_penalties_fit_beside_the_cache(tmp_path: Path) -> None:
    checkpoint = GreedyCheckpoint(
        tmp_path,
        "LlamaForCausalLM",
        lengths=(5, 100),
        max_tokens=1,
        hidden_size=128,
        num_hidden_layers=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    llm = checkpoint.llm(
        torch.device("cuda"),
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=SHARE,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    # Most of the share, but for what other processes have taken meanwhile, which counts as ours.
    assert torch.cuda.memory_reserved() - before > 0.2 * SHARE * total
    prompts = [checkpoint.prompts[i % 2] for i in range(300)]
    params = SamplingParams(
        temperature=1.0, top_p=0.9, presence_penalty=0.5, logprobs=5, max_tokens=20, ignore_eos=True
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)
    assert torch.cuda.max_memory_reserved() - before <= SHARE * total


def test_a_step_without_memory_ends_its_requests_and_nobody_elses(tmp_path: Path) -> None:
    """The GPU has no memory left for a while, except what the allocator holds."""
    checkpoint = GreedyCheckpoint(
        tmp_path,
        "LlamaForCausalLM",
        lengths=(5, 1500),
        max_tokens=8,
        hidden_size=128,
        head_dim=64,
        num_hidden_layers=2,
        max_position_embeddings=2048,
    )
    fields = {
        "model": str(checkpoint.path),
        "dtype": "float32",
        "device": "cuda",
        "enforce_eager": True,
        "max_num_batched_tokens": 2048,
        **SHARED_GPU,
    }
    core = EngineCore(EngineConfig.parse(fields))
    short, long = checkpoint.prompts
    params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def finish() -> StepOutputs:
        outputs = []
        while core.has_unfinished_requests():
            outputs.append(core.step())
            core.check_integrity()
        core.check_idle()
        return StepOutputs.concatenated(outputs)

    core.add_request(AddRequest(1, pack_token_ids(short), params))
    assert not core.step().failures
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        core.add_request(AddRequest(2, pack_token_ids(long), params))
        outputs = finish()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 2 in {failure.uid for failure in outputs.failures}
    assert all("gpu_memory_utilization" in failure.message for failure in outputs.failures)
    for uid, index in ((3, 0), (4, 1)):
        core.add_request(AddRequest(uid, pack_token_ids(checkpoint.prompts[index]), params))
    tokens: dict[int, list[int]] = {3: [], 4: []}
    for row in finish().rows():
        tokens[row.uid] += row.token_ids
    assert [tokens[3], tokens[4]] == [answer.token_ids for answer in checkpoint.answers]
