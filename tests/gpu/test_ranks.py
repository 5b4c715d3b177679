"""Ranks with a GPU each give the tokens of one GPU, and what they exchange can be captured.

No machine with two GPUs has run this yet, and none with one what needs symmetric memory.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import LLM, SamplingParams
from engine.execution.graphs.step_graphs import CudaCapturer
from engine.ranks import symmetric_memory
from engine.ranks.exchange import CollectiveGroup, allocate_store
from tests.factories.checkpoints import write_checkpoint
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.collectives.checks import different_bits, different_replays

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 256}
PROMPTS = [[5, 6, 7], list(range(20, 90)), [9] * 40]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"enforce_eager": True}),
        ("LlamaForCausalLM", {"deterministic": True}),
        ("MixtralForCausalLM", {"enable_expert_parallel": True}),
    ],
)
def test_ranks_give_the_tokens_of_one_device(
    architecture: str, settings: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    write_checkpoint(tmp_path, architecture, vocab_size=400, initializer_range=0.1, **SHAPE)
    byte_level_tokenizer().save_pretrained(tmp_path)
    found = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path),
            device=device.type,
            dtype="float32",
            max_model_len=128,
            tensor_parallel_size=size,
            **settings,
        )
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        del llm
    assert found[0] == found[1]


def capture(work: Callable[[], None]) -> Callable[[], None]:
    return CudaCapturer().capture(work).replay


def check_sums(rank: int, size: int, store_path: str, results: Connection) -> None:
    """Be a rank, a process of its own; send what is wrong with its sums."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store: Any = dist.FileStore(store_path, size)
    store.set_timeout(timedelta(seconds=60))
    peers = symmetric_memory.join(store, rank, size, device)
    found = list(different_bits(peers, [torch.bfloat16, torch.float16, torch.float32]))
    found += different_replays(peers, torch.bfloat16, capture, num_replays=200)
    results.send(found)
    results.recv()  # the memory is the other ranks' too


@pytest.mark.parametrize("size", [2, 4])
def test_processes_on_one_gpu_sum_and_norm_to_the_bit(
    size: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns on it: this shows that results are right, and says nothing of time."""
    if device.type != "cuda":
        pytest.skip("tests/kernels/collectives does the same in the interpreter")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=check_sums, args=(rank, size, str(tmp_path / "store"), theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    try:
        for number, (ours, _) in enumerate(pipes):
            assert ours.poll(300), f"rank {number} does not end"
            assert ours.recv() == []
        for ours, _ in pipes:
            ours.send("end")
    finally:
        for rank in ranks:
            rank.join(30)
            rank.kill()


@pytest.mark.parametrize("deterministic", [False, True])
def test_collectives_of_one_rank_replayed_in_a_graph_give_what_it_has(
    deterministic: bool, device: torch.device
) -> None:
    file = allocate_store()
    where = torch.device("cuda", 0) if device.type == "cuda" else device
    group = CollectiveGroup(file, 0, 1, device=where, patience_s=60.0, deterministic=deterministic)
    os.close(file)
    x, token_ids = torch.zeros(3, 64, device=where), torch.zeros(3, dtype=torch.int64, device=where)
    summed, gathered, shared = torch.empty_like(x), torch.empty_like(x), torch.empty_like(token_ids)

    def work() -> None:
        summed.copy_(group.sum(x.clone()))
        gathered.copy_(group.gather(x, [64]))
        shared.copy_(group.share(token_ids.clone()))

    capturer = CudaCapturer() if device.type == "cuda" else ReplayingCapturer()
    graph = capturer.capture(work)
    for number in range(1, 100):
        x.fill_(number)
        token_ids.fill_(number)
        graph.replay()
        assert all(bool((each == number).all()) for each in (summed, gathered, shared))
