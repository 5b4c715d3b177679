"""The engine alone as a target: its answers, and its KV blocks counted between steps."""

from __future__ import annotations

import asyncio

import pytest

from client.bench.load import engine
from client.bench.load.plan import Plan, Session
from client.bench.load.prompts import PromptSource, Turn
from client.bench.load.record import CUT, Record, Target
from client.bench.load.scrape import Metrics
from client.bench.load.worker import ask_all
from engine.config.engine_config import EngineConfig
from engine.demo import CHECKPOINT_DIR

BLOCK, PROMPT, ANSWER, N = 16, 64, 40, 4


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # else the engine sets them
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setattr(engine, "_SAMPLES_S", 0.0)  # at each step
    config = EngineConfig.parse({"model": "demo", "device": "cpu", "block_size": BLOCK})
    return Target("engine", "", "demo", settings=config.model_dump(mode="json"))


def run(target: Target, plan: Plan) -> tuple[list[Record], Metrics]:
    found = asyncio.run(ask_all(target, plan))
    assert found.metrics is not None
    return found.records, found.metrics


def turn(output_tokens: int) -> Turn:
    return PromptSource(CHECKPOINT_DIR).turn(f"seed {output_tokens}", PROMPT, output_tokens)


def test_sequences_that_share_a_prompt_save_its_blocks(target: Target) -> None:
    plan = Plan([Session(0, [turn(ANSWER)], 0.0)], n=N, temperature=1.0)
    (record,), metrics = run(target, plan)
    assert (record.error, record.num_tokens, record.prompt_tokens) == ("", N * ANSWER, PROMPT)
    assert len(record.arrivals) <= ANSWER + 1  # the four of a step are one response
    shared = PROMPT // BLOCK - 1  # each computes the prompt's last token, in a block of its own
    seen = [s for s in metrics.samples if s.running == N and s.kv_saved]
    saved = {round(1 - (shared + N * own) / (N * (shared + own)), 6) for own in (2, 3, 4)}
    assert {round(s.kv_saved or 0.0, 6) for s in seen} >= saved
    # At most the last block of each sequence is not full, and some are.
    wastes = [s.kv_waste or 0.0 for s in seen]
    assert 0 <= min(wastes) < max(wastes) <= N * (BLOCK - 1) / (BLOCK * (shared + N))


def test_a_run_that_is_cut_leaves_nothing(target: Target) -> None:
    plan = Plan([Session(0, [turn(1000)])], concurrency=1, duration=0.2)
    (cut,), _ = run(target, plan)
    assert cut.error == CUT
    (record,), metrics = run(target, Plan([Session(0, [turn(4)], 0.0)]))
    assert record.error == ""
    assert {s.running for s in metrics.samples} <= {0, 1}


def test_a_refusal_is_told(target: Target) -> None:
    (record,), _ = run(target, Plan([Session(0, [turn(4)], 0.0)], n=1, temperature=-1.0))
    assert "temperature" in record.error
