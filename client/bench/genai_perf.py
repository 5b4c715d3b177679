"""NVIDIA's genai-perf, which runs perf_analyzer and counts tokens."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from client.bench import perf_analyzer
from client.bench.tools import Load, ToolEnvironment, is_given, require_server
from engine.demo import CHECKPOINT_DIR
from engine.hub import DEMO
from engine.launch.model_configs import ENSEMBLE

_NAME = "genai-perf"
_VERSION = "0.0.16"
NAME_AND_VERSION = f"{_NAME}-{_VERSION}"
_PROMPT_TOKENS = 128
# It pins almost nothing itself: these are versions it is known to work with.
_REQUIREMENTS = (
    f"{_NAME}=={_VERSION}",
    "transformers>=5,<6",
    "numpy<3",
    "pandas<4",
    "plotly<8",
    "kaleido<2",
)
# Flags that exclude one of ours.
_INSTEAD_OF = {
    "--concurrency": ("--request-rate", "--fixed-schedule", "--session-concurrency"),
    "--request-count": ("--measurement-interval", "--fixed-schedule", "--num-sessions"),
}

Backend = Literal["tensorrtllm", "vllm"]


def find_or_install(console: Console) -> Path:
    """Return the executable of genai-perf, installing it if needed.

    Raises:
        BenchError: it cannot be installed; the message says what to do.
    """
    environment = ToolEnvironment(NAME_AND_VERSION, console)
    if not environment.is_installed:
        environment.install(_REQUIREMENTS, with_dependencies=True)
        environment.finish()
    return environment.path / "bin" / _NAME


def run(
    url: str,
    backend: Backend,
    load: Load,
    tokenizer: str,
    further: Sequence[str],
    console: Console,
) -> int:
    """Measure the server at `url`; genai-perf prints its table. Return its exit status.

    Args:
        backend: the Triton LLM backend whose request format to use.
        tokenizer: a folder, a hub id, or `demo`; generates prompts and counts output tokens.
        further: flags for genai-perf, which override those set here.

    Raises:
        BenchError: genai-perf is not available, or nothing listens at `url`.
    """
    analyzer = perf_analyzer.find_or_install(console)
    tool = find_or_install(console)
    require_server(url)
    source = str(CHECKPOINT_DIR) if tokenizer == DEMO else tokenizer
    with tempfile.TemporaryDirectory(prefix="trident-bench-") as folder:
        flags = arguments(url, backend, source, Path(folder), load, further)
        console.print("Running", _NAME, *flags, highlight=False, markup=False, soft_wrap=True)
        environment = analyzer.environment(os.environ)
        if Path(source).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"  # it would look up the folder's name there
        return subprocess.run([str(tool), *flags], env=environment, check=False).returncode


def arguments(
    url: str,
    backend: Backend,
    tokenizer: str,
    artifacts: Path,
    load: Load,
    further: Sequence[str],
) -> list[str]:
    """Return genai-perf's flags."""
    flags = ["profile", "--endpoint-type", "kserve", "--backend", backend, "--streaming"]
    flags += ["-u", url, "--tokenizer", tokenizer]
    if not is_given(further, "-m", "--model"):
        flags += ["-m", ENSEMBLE]
    if not is_given(further, "--artifact-dir"):
        flags += ["--artifact-dir", str(artifacts)]
    if not is_given(further, "--output-tokens-mean"):
        flags += ["--output-tokens-mean-deterministic"]  # min_tokens equals max_tokens
    load_flags = {
        "--concurrency": load.streams,
        "--request-count": load.requests,
        "--synthetic-input-tokens-mean": _PROMPT_TOKENS,
        "--synthetic-input-tokens-stddev": 0,
        "--output-tokens-mean": load.max_tokens,
    }
    for flag, value in load_flags.items():
        if not is_given(further, flag, *_INSTEAD_OF.get(flag, ())):
            flags += [flag, str(value)]
    return [*flags, *further]
