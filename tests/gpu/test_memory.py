"""An engine stays within its share of the GPU, whatever its requests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from tests.factories.greedy import GreedyCheckpoint

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
    assert torch.cuda.memory_reserved() - before > 0.5 * SHARE * total, "the cache fills the share"
    prompts = [checkpoint.prompts[i % 2] for i in range(300)]
    params = SamplingParams(
        temperature=1.0, top_p=0.9, presence_penalty=0.5, logprobs=5, max_tokens=20, ignore_eos=True
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 20 for output in outputs)
    assert torch.cuda.max_memory_reserved() - before <= SHARE * total
