"""NVTX ranges: nested by name where a profiler records, and nothing at all elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.nvtx import is_recorded, nvtx_range
from tests.factories.readmes import ROOT, examples

LIBRARY = "/opt/nvidia/nsight-systems/libToolsInjection64.so"


@pytest.mark.parametrize(
    ("cuda", "environ", "expected"),
    [
        ("13.0", {"NVTX_INJECTION64_PATH": LIBRARY}, True),
        ("13.0", {"NSYS_PROFILING_SESSION_ID": "17"}, True),
        ("13.0", {"NVTX_INJECTION64_PATH": ""}, False),
        ("13.0", {"PATH": "/bin"}, False),
        (None, {"NVTX_INJECTION64_PATH": LIBRARY}, False),
    ],
)
def test_a_profiler_says_that_it_records(
    cuda: str | None, environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert is_recorded(environ) is expected


def test_ranges_nest_and_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))

    @nvtx_range("forward", recorded=True)
    def forward(size: int) -> int:
        if size < 0:
            raise ValueError("wrong")
        return 2 * size

    @nvtx_range("step", recorded=True)
    def step(*, size: int) -> int:
        return forward(size) + 1

    assert [step(size=2), step(size=3)] == [5, 7]
    with pytest.raises(ValueError, match="wrong"):
        step(size=-1)
    assert events == ["step", "forward", "end", "end"] * 3


def test_without_a_profiler_a_function_stays_as_it_is() -> None:
    def step() -> None:
        pass

    assert nvtx_range("step", recorded=False)(step) is step
    assert not hasattr(EngineCore.step, "__wrapped__"), "no profiler records these tests"


def test_the_parts_of_a_step_are_named_as_in_the_readme() -> None:
    """In a process that a profiler seems to have started."""
    code = """
        import torch
        torch.version.cuda = "13.0"
        names = set()
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = names.add, lambda: None
        from engine import LLM, SamplingParams
        llm = LLM("demo", device="cpu", max_num_seqs=2, num_gpu_blocks_override=40)
        llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=False)
        print(sorted(names))
    """
    ran = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        cwd=ROOT,
        env={**os.environ, "NVTX_INJECTION64_PATH": LIBRARY},
        capture_output=True,
        text=True,
        check=True,
    )
    named = set(ast.literal_eval(ran.stdout.splitlines()[-1]))
    readme = (ROOT / "engine" / "README.md").read_text(encoding="utf-8")
    section = readme.split("The ranges:")[1].split("\n## ")[0]
    listed = set(re.findall(r"`([a-z ]+)`", section))
    assert named == listed - {"replay forward", "replay sampling"}, "a CPU has no graphs"


def test_processes_that_compute_nothing_do_not_import_torch_for_it() -> None:
    code = "import engine.nvtx, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "."})


def test_the_command_that_records_traces_ranges_and_the_nodes_of_graphs() -> None:
    (command,) = [example.text for example in examples() if example.text.startswith("nsys ")]
    assert "--trace=cuda,nvtx" in command
    assert "--cuda-graph-trace=node" in command
