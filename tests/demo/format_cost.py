"""How large each format of quantised checkpoints is on a CPU: on disk, in memory, and to load.

Run as ``python -m tests.demo.format_cost CHECKPOINT [FILE.gguf ...]``. The checkpoint, in floating
point and with Llama's names, is written in each format and loaded by a process of its own; so are
the GGUF files (`python -m tests.factories.gguf_files` makes some).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import Int8Linear
from engine.layers.linear.onednn import OneDnnLinear
from tests.demo.encoders import ENCODERS, Named

_WEIGHTS = "model.safetensors"
_MIB = 2**20


def write_format(checkpoint: Path, named: Named, folder: Path) -> None:
    """Write a checkpoint in one file with the projections of its layers in a format."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(_WEIGHTS))
    stored = load_file(checkpoint / _WEIGHTS)
    for name in list(stored):
        module, _, last = name.rpartition(".")
        if last == "weight" and module.endswith("_proj"):
            tensors = named.encode(stored.pop(name).float()).tensors
            stored |= {f"{module}.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(stored, folder / _WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**(named.config or {}), "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def measure(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Load a model in this process; return what that took.

    Memory is that of the process beyond what it was before, with a KV cache of 256 tokens.
    """
    process = psutil.Process()
    before, begin = process.memory_info().rss, time.perf_counter()
    small = {"max_num_seqs": 1, "max_model_len": 256, "num_gpu_blocks_override": 17}
    llm = LLM(model, device="cpu", dtype="bfloat16", **small, **settings)
    seconds = time.perf_counter() - begin
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    layers = llm._core._runner.model.model.layers  # type: ignore[attr-defined]
    is_integer = [
        isinstance(module, Int8Linear)
        or (isinstance(module, CpuPackedLinear) and "scale" in module.tensors())
        for module in layers.modules()
        if isinstance(module, (Int8Linear, OneDnnLinear, CpuPackedLinear))
    ]
    return {
        "product": "integers" if is_integer and all(is_integer) else "floats",
        "seconds": seconds,
        "memory": (process.memory_info().rss - before) / _MIB,
        "peak": (peak - before) / _MIB,
    }


def _measured(model: Path, **settings: str) -> dict[str, Any]:
    arguments = [json.dumps([str(model), settings])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo.format_cost", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print_row(name: str, path: Path, found: Mapping[str, Any]) -> None:
    file = path if path.is_file() else path / _WEIGHTS
    print(
        f"| {name} | {found['product']} | {file.stat().st_size / _MIB:,.0f} | "
        f"{found['memory']:,.0f} | {found['peak']:,.0f} | {found['seconds']:.1f} |",
        flush=True,
    )


def main(
    checkpoint: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    files: Annotated[list[Path] | None, typer.Argument(help="GGUF files.")] = None,
) -> None:
    """Print a table of Markdown, in MiB and seconds."""
    if checkpoint.startswith("["):  # of the process that measures
        print(json.dumps(measure(*json.loads(checkpoint))))
        return
    source = Path(checkpoint)
    print("|  | products of | file | memory | at most, while loading | seconds to load |")
    print("| --- | --- | --- | --- | --- | --- |")
    _print_row("none, bfloat16", source, _measured(source))
    for setting in ("int8", "int4"):
        name = f"`--quantization {setting}`"
        _print_row(name, source, _measured(source, quantization=setting))
    for name, named in ENCODERS.items():
        if named.config is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "checkpoint"
                write_format(source, named, path)
                _print_row(name, path, _measured(path))
    for file in files or ():
        _print_row(file.name, file, _measured(file))


if __name__ == "__main__":
    typer.run(main)
