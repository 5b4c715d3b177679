"""NVIDIA's perf_analyzer: the one on PATH, or the last that a wheel contains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from client.bench.errors import BenchError
from client.bench.tools import (
    SDK_CONTAINER,
    Load,
    ToolEnvironment,
    extract_debian_package,
    is_given,
    library_folder,
    require_server,
)
from engine.demo.prompts import DEMO_PROMPTS
from engine.launch.model_configs import ENSEMBLE

_NAME = "perf_analyzer"
# Later wheels need a newer glibc than Debian 12's, and the latest contain no perf_analyzer.
_WHEEL = "tritonclient==2.50.0"
_CUDA_RUNTIME = "nvidia-cuda-runtime-cu12"
_CUDA_LIBRARY = "libcudart.so.12"
_BASE64_PACKAGE = "libb64-0d"
_BASE64_LIBRARY = "libb64.so.0d"
_LOAD_FLAGS = (
    "--concurrency-range",
    "--periodic-concurrency-range",
    "--request-rate-range",
    "--request-intervals",
)


@dataclass(frozen=True)
class PerfAnalyzer:
    """A perf_analyzer that runs on this machine.

    Attributes:
        binary: the executable.
        libraries: folders that LD_LIBRARY_PATH must name.
    """

    binary: Path
    libraries: tuple[Path, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with the variables that the tool, and a search for it on PATH, need."""
        path = [str(self.binary.parent), base.get("PATH", os.defpath)]
        libraries = [*map(str, self.libraries), base.get("LD_LIBRARY_PATH", "")]
        return {
            **base,
            "PATH": os.pathsep.join(path),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }

    def problem(self) -> str:
        """Return why it does not start on this machine; empty if it starts."""
        try:
            tried = subprocess.run(
                [self.binary, "--version"],
                env=self.environment(os.environ),
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            return error.strerror or str(error)
        words = (tried.stderr or tried.stdout).strip().splitlines() or [""]
        return "" if tried.returncode == 0 else f"status {tried.returncode}: {words[-1]}"


def find_or_install(console: Console) -> PerfAnalyzer:
    """Return a perf_analyzer, installing one if none on PATH starts.

    Raises:
        BenchError: it cannot be installed here; the message says what to do.
    """
    on_path = shutil.which(_NAME)
    if on_path is not None and not (found := PerfAnalyzer(Path(on_path))).problem():
        return found
    environment = ToolEnvironment(f"perf_analyzer-{_WHEEL.partition('==')[2]}", console)
    if not environment.is_installed:
        environment.install([_WHEEL, _CUDA_RUNTIME], with_dependencies=False)
        extract_debian_package(environment, _BASE64_PACKAGE)
    installed = PerfAnalyzer(
        environment.path / "bin" / _NAME,
        tuple(library_folder(environment, name) for name in (_CUDA_LIBRARY, _BASE64_LIBRARY)),
    )
    if problem := installed.problem():
        raise BenchError(
            f"the perf_analyzer of {_WHEEL} does not start here: {problem}; it is made for x86-64 "
            f"with glibc 2.36 or newer, and elsewhere there is the container {SDK_CONTAINER}"
        )
    environment.finish()
    return installed


def run(url: str, load: Load, further: Sequence[str], console: Console) -> int:
    """Measure the server at `url`; perf_analyzer prints its tables. Return its exit status.

    Args:
        load: the load to send; the prompts are the demo's questions.
        further: flags for perf_analyzer, which override those set here.

    Raises:
        BenchError: it is not available, or nothing listens at `url`.
    """
    tool = find_or_install(console)
    require_server(url)
    with tempfile.TemporaryDirectory(prefix="trident-bench-") as folder:
        data = Path(folder) / "input.json"
        data.write_text(json.dumps(input_data(load.max_tokens)), encoding="utf-8")
        flags = arguments(url, load, data, further)
        console.print("Running", _NAME, *flags, highlight=False, markup=False, soft_wrap=True)
        command = [str(tool.binary), *flags]
        return subprocess.run(command, env=tool.environment(os.environ), check=False).returncode


def arguments(url: str, load: Load, data: Path, further: Sequence[str]) -> list[str]:
    """Return perf_analyzer's flags: a decoupled model needs gRPC and streaming."""
    flags = ["-i", "grpc", "--streaming", "-u", url]
    if not is_given(further, "-m"):
        flags += ["-m", ENSEMBLE]
    if not is_given(further, "--input-data"):
        flags += ["--input-data", str(data)]
    if not is_given(further, *_LOAD_FLAGS):
        flags += ["--concurrency-range", str(load.streams)]
        if not is_given(further, "--request-count"):
            flags += ["--request-count", str(load.requests)]
    return [*flags, *further]


def input_data(max_tokens: int) -> dict[str, Any]:
    """Return requests answered with exactly `max_tokens` tokens, in perf_analyzer's JSON format."""
    return {
        "data": [
            {
                "text_input": [prompt],
                "max_tokens": [max_tokens],
                "stream": [True],
                "exclude_input_in_output": [True],
                "sampling_parameters": [json.dumps({"ignore_eos": True})],
            }
            for prompt in DEMO_PROMPTS
        ]
    }
