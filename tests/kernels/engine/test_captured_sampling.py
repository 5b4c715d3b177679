"""Sampling in graphs gives the bits that it gives kernel by kernel.

In the interpreter with a capturer that runs the captured work again; on a GPU with CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")


from engine import SamplingParams
from engine.execution.downloads import Downloads
from engine.execution.graphs.captured_steps import SampleGraphs
from engine.execution.graphs.step_graphs import Capturer, CudaCapturer
from kernels import device
from kernels.sampling.draw import sample_tokens
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.token_scatter import scatter_tokens
from tests.factories.greedy import GreedyCheckpoint
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.kernels.slot_cases import assert_tables_equal, random_tables
from tests.kernels.support import DEVICE, randn

pytestmark = pytest.mark.usefixtures("small_gpu")

NUM_SLOTS, HIDDEN, VOCAB = 6, 16, 301
MAX_TOKENS = 4


def make_capturer() -> Capturer:
    return ReplayingCapturer() if device.INTERPRETED else CudaCapturer()


class Head:
    """The head of a model."""

    def __init__(self) -> None:
        self.weight = randn(HIDDEN, VOCAB, seed=3)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


def set_params(tables: SeqSlotTables, step: int, *, filters: bool) -> None:
    rng = np.random.default_rng(step)

    def column(values: Any, table: Tensor) -> None:
        table.copy_(torch.from_numpy(np.asarray(values)).to(table.dtype))

    column(rng.choice([0.0, 0.7, 1.3], NUM_SLOTS), tables.temperature)
    column(rng.choice([0, 5, 50], NUM_SLOTS) * filters, tables.top_k)
    column(np.where(filters, rng.choice([0.5, 0.9, 1.0], NUM_SLOTS), 1.0), tables.top_p)
    column(rng.choice([0.0, 0.05], NUM_SLOTS) * filters, tables.min_p)
    column(rng.integers(-(2**63), 2**63, NUM_SLOTS), tables.seeds)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_replay_is_bitwise_what_the_kernels_do_one_by_one() -> None:
    """With padding, ended and idle rows, as the host runs ahead: inputs change between replays."""
    tables, head = random_tables(NUM_SLOTS, max_model_len=60), Head()
    hidden = torch.zeros(NUM_SLOTS, HIDDEN, device=DEVICE)
    slots = torch.full((NUM_SLOTS,), -1, dtype=torch.int32, device=DEVICE)
    graphs = SampleGraphs(head.compute_logits, tables, hidden, slots, [1, 2, 4, 6])
    for _ in graphs.capture(make_capturer()):
        pass
    expected = tables.clone()
    downloads, in_flight = Downloads(DEVICE), []
    for step in range(8):
        num_rows = 1 + step % NUM_SLOTS
        has_filters = step % 3 == 0
        set_params(tables, step, filters=has_filters)
        set_params(expected, step, filters=has_filters)
        hidden.copy_(randn(NUM_SLOTS, HIDDEN, seed=step))
        slots.fill_(-1)
        order = np.random.default_rng(step).permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
        slots[:num_rows] = torch.from_numpy(order).to(DEVICE)
        # Padded to the same size: a product may differ in its last bits with the number of rows.
        size = min(size for size in (1, 2, 4, 6) if size >= num_rows)
        logits = head.compute_logits(hidden[:size])[:num_rows]
        token_ids = sample_tokens(logits, expected, slots[:num_rows], has_filters=True)
        reasons = scatter_tokens(expected, slots[:num_rows], token_ids)
        packed = graphs.run(num_rows, has_filters=has_filters)
        in_flight.append((downloads.copy(packed), token_ids, reasons))
    for download, token_ids, reasons in in_flight:
        found_ids, found_reasons = download.wait()
        assert found_ids[: len(token_ids)].tolist() == token_ids.tolist()
        assert found_reasons[: len(reasons)].tolist() == reasons.tolist()
    assert_tables_equal(tables, expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("llama"),
        "LlamaForCausalLM",
        lengths=(5, 9, 3),
        max_tokens=MAX_TOKENS,
        num_hidden_layers=1,
        head_dim=32,
    )


SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "enable_prefix_caching": False,
    "async_scheduling": True,
}
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 4, "ignore_eos": False, "stop_token_ids": [*range(40)]},
]
FILTERS: list[dict[str, Any]] = [
    *PLAIN[:2],
    {"temperature": 0.8, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]
SPECIAL: list[dict[str, Any]] = [
    *PLAIN[:2],
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.3, "max_tokens": 2},
]


@pytest.mark.skipif(not device.INTERPRETED, reason="counts the replays of a fake")
def test_chunks_that_end_within_a_prompt_compute_no_logits(checkpoint: GreedyCheckpoint) -> None:
    llm = checkpoint.llm(DEVICE, **{**SETTINGS, "max_model_len": 64})
    capturer = ReplayingCapturer()
    llm._core._runner.capture_graphs(capturer, lambda done, total: None)
    asked = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([[7] * 40], asked, use_tqdm=False)
    assert sum(capturer.num_replays[-6:]) == 1
    assert sum(capturer.num_replays[:-6]) == 3, "chunks of 16, 16 and 8 tokens"


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_answers_are_those_of_an_engine_without_graphs(checkpoint: GreedyCheckpoint) -> None:
    eager = checkpoint.llm(DEVICE, **SETTINGS, enforce_eager=True)
    captured = checkpoint.llm(DEVICE, **SETTINGS)
    capturer = ReplayingCapturer()
    if device.INTERPRETED:
        captured._core._runner.capture_graphs(capturer, lambda done, total: None)
    sampled: list[list[int]] = []
    for kind in (PLAIN, FILTERS, SPECIAL):
        asked = [
            SamplingParams.parse({"max_tokens": MAX_TOKENS, "ignore_eos": True, **fields})
            for fields in kind
        ]
        answers = [
            [output.outputs[0].token_ids for output in llm.generate(checkpoint.prompts, asked)]
            for llm in (eager, captured)
        ]
        assert answers[0] == answers[1]
        # The last 6 graphs: of 4, 2 and 1 rows, each with filters and without.
        sampled.append(capturer.num_replays[-6:])
    if device.INTERPRETED:
        plain, filters, special = (np.array(counts) for counts in sampled)
        assert plain[1::2].sum() > 0 == plain[::2].sum()
        assert (filters - plain)[::2].sum() > 0
        # The request with log-probabilities ends first: the others go on in graphs.
        assert 0 < (special - filters).sum() < (filters - plain).sum()
