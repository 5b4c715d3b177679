"""`trident bench stages` without a server: prompts, timing, CPU time, figures, tables."""

import asyncio
import io
import os
import time
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from client import AsyncTridentClient, cli
from client.bench.cpu import CLIENT, OTHERS, STOLEN, CpuMeter, process_name
from client.bench.errors import BenchError
from client.bench.load import prompts
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave
from client.bench.report import Round, Spread, cpu_table, percentile, row, throughput_table
from client.bench.stages import StageBenchmark
from client.bench.waves import Trace, run_wave, summary
from client.bench.workload import PromptSource, Workload
from engine.demo import CHECKPOINT_DIR
from engine.text.tokenizer import Tokenizer
from tests.client.fake_triton import FakeTriton, Piece
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, save_tokenizer


class TestPrompts:
    @pytest.mark.parametrize("num_tokens", [1, 2, 128, 700])
    def test_have_the_length_that_was_asked_for(self, num_tokens: int) -> None:
        tokenizer = Tokenizer.from_pretrained(CHECKPOINT_DIR)
        for prompt in PromptSource(CHECKPOINT_DIR, num_tokens).draw("seed", 5):
            assert prompt.token_ids == tokenizer.encode(prompt.text)
            assert len(prompt.token_ids) == num_tokens

    def test_are_seeded_and_share_no_prefix(self) -> None:
        source = PromptSource(CHECKPOINT_DIR, 32)
        first = source.draw("0/4/0", 4)
        assert source.draw("0/4/0", 4) == first
        both = [*first, *source.draw("0/4/1", 4)]
        assert len({tuple(prompt.token_ids[:16]) for prompt in both}) == 8  # one KV block

    def test_may_begin_with_the_same_tokens(self) -> None:
        source = prompts.PromptSource(CHECKPOINT_DIR)
        beginning = source.words("seed", 32)
        made = [source.prompt(str(number), 48, beginning) for number in range(4)]
        assert {len(prompt.token_ids) for prompt in made} == {48}
        assert len({tuple(prompt.token_ids[:32]) for prompt in made}) == 1
        assert len({tuple(prompt.token_ids[32:]) for prompt in made}) == 4

    @pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
    def test_other_tokenizers(self, tmp_path: Path, make: Any) -> None:
        folder = save_tokenizer(make(), tmp_path)
        (prompt,) = PromptSource(folder, 20).draw("", 1)
        assert prompt.token_ids == Tokenizer.from_pretrained(folder).encode(prompt.text)
        assert len(prompt.token_ids) == 20


def _wave(seconds: float, *, num_tokens: int = 100, cpu: float = 0.5) -> Wave:
    return Wave(
        streams=2,
        num_tokens=num_tokens,
        seconds=seconds,
        cpu_seconds={"engine process": cpu, "client": 0.1},
        ttfts=[0.010, 0.030],
        gaps=[0.002, 0.004, 0.006],
        num_responses=50,
    )


class TestFigures:
    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
    def test_percentile_is_numpys(self, values: list[float], percent: float) -> None:
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))

    def test_percentile_of_nothing(self) -> None:
        assert percentile([], 50) == 0

    def test_row(self) -> None:
        rounds = [
            Round(engine=[_wave(1.0), _wave(0.5), _wave(1.0)], ensemble=[_wave(2.0)]),
            Round(engine=[_wave(4.0)], ensemble=[_wave(5.0, cpu=1.5)]),
        ]
        summarised = row(2, rounds)
        assert summarised.engine == Spread(100.0, 25.0, 200.0)
        assert summarised.ensemble == Spread(35.0, 20.0, 50.0)
        assert summarised.ratio == Spread(pytest.approx(0.65), 0.5, pytest.approx(0.8))  # per round
        assert summarised.ttft == (pytest.approx(0.020), pytest.approx(0.030))
        assert summarised.gap == (0.004, pytest.approx(0.006))
        assert summarised.tokens_per_response == 2.0
        assert summarised.ensemble_cpu == {"engine process": 10.0, "client": 1.0}
        assert summarised.engine_cpu["engine process"] == 5.0

    def test_tables_fit_80_columns(self) -> None:
        rounds = [Round([_wave(0.01)], [_wave(0.015)]), Round([_wave(0.02)], [_wave(0.03)])]
        rows = [row(streams, rounds) for streams in (1, 16, 64)]
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(throughput_table(rows))
        console.print(cpu_table(rows))
        text = console.export_text()
        assert "…" not in text
        for cell in ("7500", "5000-10000", "5000", "3333-6667", "0.67", "20.0", "30.0", "2.00"):
            assert f" {cell} " in text
        assert "engine process, alone" in text


def _ask(url: str, prompts: Sequence[Prompt], max_tokens: int) -> Wave:
    async def ask() -> Wave:
        async with AsyncTridentClient(url) as client:
            sampling = Workload(max_tokens=max_tokens).sampling
            return await run_wave(client, prompts, sampling, CpuMeter(os.getpid()))

    return asyncio.run(ask())


class TestLoad:
    PROMPT = Prompt("a", [1] * 7)  # the fake server counts every prompt as 7 tokens

    def test_summary(self) -> None:
        traces = [Trace([10.5, 10.6, 10.9], 6), Trace([10.7], 2)]
        wave = summary(traces, started=10.0)
        assert (wave.streams, wave.num_tokens, wave.num_responses) == (2, 8, 4)
        assert wave.seconds == pytest.approx(0.9)
        assert wave.ttfts == pytest.approx([0.5, 0.7])
        assert wave.gaps == pytest.approx([0.1, 0.3])

    def test_times_what_comes(self, triton: FakeTriton) -> None:
        triton.pieces = [
            Piece({0: "a b"}, delay_s=0.05),
            Piece({0: ""}),
            Piece({0: "c"}, delay_s=0.1, finished=(0,), final=True),
        ]
        wave = _ask(triton.url, [self.PROMPT] * 2, 3)
        assert (wave.streams, wave.num_tokens, wave.num_responses) == (2, 6, 4)
        assert wave.seconds >= 0.15
        assert all(ttft >= 0.05 for ttft in wave.ttfts)
        assert all(gap >= 0.09 for gap in wave.gaps)
        assert CLIENT in wave.cpu_seconds
        assert {request["text_input"] for request in triton.requests} == {"a"}
        assert triton.requests[0]["sampling_parameters"] == {
            "max_tokens": 3,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
        }

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(Prompt("a", [1]), 1), (PROMPT, 2)])
    def test_reports_no_figure_for_a_wrong_answer(
        self, triton: FakeTriton, prompt: Prompt, max_tokens: int
    ) -> None:
        triton.pieces = [Piece({0: "a"}, finished=(0,), final=True)]
        with pytest.raises(BenchError, match="answered with 1"):
            _ask(triton.url, [prompt], max_tokens)


class TestCpu:
    def test_names(self) -> None:
        stub = ["/run/backends/python/triton_python_backend_stub", "/r/tokenizer/1/model.py", "x"]
        assert process_name("triton_python_b", stub) == "tokenizer stub"
        engine = ["/venv/bin/python3", "-m", "engine.service.process", "--fd", "6"]
        assert process_name("python3", engine) == "engine process"
        assert process_name("tritonserver", ["/opt/bin/tritonserver"]) == "tritonserver"
        for module in (["client.cli", "gateway"], ["client.gateway.worker", "3"]):
            assert process_name("python3", ["/venv/bin/python3", "-m", *module]) == "gateway"
        assert process_name("python3", ["python3", "-m", "client.cli", "serve"]) == "python3"

    def test_counts_what_is_used_between_start_and_stop(self) -> None:
        meter = CpuMeter(os.getpid())
        meter.start()
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        used = meter.stop()
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
        meter = CpuMeter(os.getpid())
        meter.start()
        passed[0] = 1000.0
        used = meter.stop()
        assert used[STOLEN] == 4000
        # Guest time is included in user time; a little of it was this process's own.
        assert 1990 < used[OTHERS] <= 2000


@pytest.mark.parametrize("streams", ["", "0", "1,x", "-1"])
def test_wrong_streams_are_named(streams: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "stages", f"--streams={streams}"])
    assert result.exit_code == 2
    assert "streams: must be numbers" in result.output


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(BenchError, match="/nonexistent/model"):
        StageBenchmark("/nonexistent/model", Workload(), Console(file=io.StringIO()))


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    path = tmp_path / "missing" / "figures.json"
    result = CliRunner().invoke(cli.app, ["bench", "stages", "--json", str(path)])
    assert isinstance(result.exception, BenchError)
    assert str(result.exception) == f"--json: cannot write {path}: No such file or directory"
