"""Choices of experts are read a call later, so that nobody waits for the device."""

from pathlib import Path

import numpy as np
import torch

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.execution.downloads import Downloads
from engine.execution.model_runner import ExpertCounts
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.mixtures import NUM_EXPERTS, our_layer, reference_block
from tests.factories.tokenizers import byte_level_tokenizer

CPU = torch.device("cpu")


def test_counts_are_those_up_to_the_call_before() -> None:
    layer = our_layer("qwen3_moe", reference_block("qwen3_moe"), CPU)
    counts = ExpertCounts(torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)]), Downloads(CPU))
    assert counts.read() is None
    layer.expert_totals += 3
    found = counts.read()
    assert found is not None
    assert not found.any()
    found = counts.read()
    assert found is not None
    np.testing.assert_array_equal(found, np.full((1, NUM_EXPERTS), 3))


def test_a_model_without_mixtures_has_none() -> None:
    counts = ExpertCounts(torch.nn.Linear(2, 2), Downloads(CPU))
    assert counts.read() is counts.read() is None


def test_the_imbalance_of_a_mixture_in_an_engine(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["mixtral"]
    write_checkpoint(tmp_path, architecture, vocab_size=400, **fields)
    byte_level_tokenizer().save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 64}
    core = EngineCore(EngineConfig.parse(settings))
    assert core.take_stats().expert_imbalance == 0
    core.add_request(AddRequest(1, pack_token_ids(range(3, 20), "input_ids"), {"max_tokens": 4}))
    while core.has_unfinished_requests():
        core.step()
    core.take_stats()
    assert 1 <= core.take_stats().expert_imbalance <= fields["num_local_experts"]
