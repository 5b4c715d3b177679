"""Prompts, and CPU time by process."""

import os
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest

from client.bench.load.prompts import PromptSource, Turn
from client.bench.measure.cpu import CLIENT, OTHERS, STOLEN, CpuMeter, process_name
from engine.demo import CHECKPOINT_DIR
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, save_tokenizer


def _prompts(folder: Path, num_tokens: int, seed: str, count: int) -> list[Turn]:
    source = PromptSource(folder)
    return [source.turn(f"{seed}/{number}", num_tokens, 1) for number in range(count)]


class TestPrompts:
    @pytest.mark.parametrize("num_tokens", [1, 2, 128, 700])
    def test_have_the_length_that_was_asked_for(self, num_tokens: int) -> None:
        tokenizer = Tokenizer.from_pretrained(CHECKPOINT_DIR)
        for prompt in _prompts(CHECKPOINT_DIR, num_tokens, "seed", 5):
            assert prompt.token_ids == tokenizer.encode(prompt.text)
            assert len(prompt.token_ids) == num_tokens

    def test_are_seeded_and_share_no_prefix(self) -> None:
        first = _prompts(CHECKPOINT_DIR, 32, "0", 4)
        assert _prompts(CHECKPOINT_DIR, 32, "0", 4) == first
        both = [*first, *_prompts(CHECKPOINT_DIR, 32, "1", 4)]
        assert len({tuple(prompt.token_ids[:16]) for prompt in both}) == 8  # one KV block

    def test_may_begin_with_the_same_tokens(self) -> None:
        source = PromptSource(CHECKPOINT_DIR)
        beginning = source.words("seed", 32)
        made = [source.turn(str(number), 48, 1, beginning) for number in range(4)]
        assert {len(prompt.token_ids) for prompt in made} == {48}
        assert len({tuple(prompt.token_ids[:32]) for prompt in made}) == 1
        assert len({tuple(prompt.token_ids[32:]) for prompt in made}) == 4

    @pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
    def test_other_tokenizers(self, tmp_path: Path, make: Any) -> None:
        folder = save_tokenizer(make(), tmp_path)
        (prompt,) = _prompts(folder, 20, "", 1)
        assert prompt.token_ids == Tokenizer.from_pretrained(folder).encode(prompt.text)
        assert len(prompt.token_ids) == 20


class TestCpu:
    def test_names(self) -> None:
        stub = ["/run/backends/python/triton_python_backend_stub", "/r/tokenizer/1/model.py", "x"]
        assert process_name("triton_python_b", stub) == "tokenizer stub"
        engine = ["/venv/bin/python3", "-m", "engine.service.process", "--fd", "6"]
        assert process_name("python3", engine) == "engine process"
        assert process_name("tritonserver", ["/opt/bin/tritonserver"]) == "tritonserver"
        for module in (["client.cli", "gateway"], ["client.gateway.processes.worker", "3"]):
            assert process_name("python3", ["/venv/bin/python3", "-m", *module]) == "gateway"
        assert process_name("python3", ["python3", "-m", "client.cli", "serve"]) == "python3"

    def test_counts_what_is_used_since_it_was_made(self) -> None:
        meter = CpuMeter(clients=[os.getpid()])
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        used = meter.used()
        assert used[CLIENT] >= 0.25
        assert used[OTHERS] >= 0
        assert used[STOLEN] >= 0

    def test_other_cores_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Times = namedtuple("Times", "user system idle iowait steal guest guest_nice")
        passed = [0.0]

        def cpu_times(*, percpu: bool) -> list[Times]:
            assert percpu
            own = Times(3 + 2 * passed[0], 1.0, 5.0, passed[0], 4 * passed[0], passed[0], 0.0)
            return [Times(100 * passed[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), own]

        monkeypatch.setattr(psutil, "cpu_times", cpu_times)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
        meter = CpuMeter(clients=[os.getpid()])
        passed[0] = 1000.0
        used = meter.used()
        assert used[STOLEN] == 4000
        # Guest time is included in user time; a little of it was this process's own.
        assert 1990 < used[OTHERS] <= 2000
