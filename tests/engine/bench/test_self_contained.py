"""The whole command runs where Python can import torch, Triton, NumPy and what travels, no more."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.bench.gpu.packages import LOCK

ROOT = Path(__file__).parents[3]


def _with_dependencies(names: Iterable[str]) -> set[str]:
    left, found = list(names), set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            requirements = map(Requirement, importlib.metadata.requires(name) or ())
            left += [
                each.name
                for each in requirements
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def _link(names: Iterable[str], site: Path) -> None:
    """Make installed distributions importable from `site`."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)


def _wheel(name: str, folder: Path) -> Path:
    """Pack an installed distribution, as its wheel was."""
    distribution = importlib.metadata.distribution(name)
    wheel = folder / f"{name.replace('-', '_')}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in distribution.files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                archive.write(str(distribution.locate_file(file)), str(file))
    return wheel


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A Python with torch, Triton and NumPy alone, and a source tree with its wheels.

    transformers is there too: to pack, unpack and compile its thousands of files shows no more.
    """
    environment, tree = tmp_path / "python", tmp_path / "tree"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python3*/site-packages")
    _link(_with_dependencies(["torch", "triton", "numpy"]) | {"transformers"}, site)
    changed = LOCK.relative_to(ROOT)
    for folder in list(changed.parents)[::-1]:  # with links to all that is not changed
        (tree / folder).mkdir()
        for path in (ROOT / folder).iterdir():
            if path.name not in changed.parts and not path.name.startswith("."):
                (tree / folder / path.name).symlink_to(path)
    wheels = tree / ".gpu-wheels"
    wheels.mkdir()
    lines = []
    for name in set(re.findall(r"^[\w-]+(?===)", LOCK.read_text(), re.M)) - {"transformers"}:
        digest = hashlib.sha256(_wheel(name, wheels).read_bytes()).hexdigest()
        lines.append(f"{name} --hash=sha256:{digest}\n")
    (tree / changed).write_text("".join(lines))
    return environment / "bin" / "python", tree


def _run(machine: tuple[Path, Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    python, tree = machine
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [python, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_run_with_torch_triton_and_numpy_alone(machine: tuple[Path, Path]) -> None:
    """Every part of the command on tiny models, from the wheels to the table."""
    missing = "import importlib.util as u; print([u.find_spec(name) for name in {}])"
    names = ["pydantic", "msgspec", "tokenizers", "pytest", "trident"]
    assert _run(machine, "-c", missing.format(names)).stdout == f"{[None] * len(names)}\n"
    wheels, out = machine[1] / ".gpu-wheels", machine[1] / "out"
    command = ("-m", "engine.bench", "--tiny", "--out", "out")

    wheels.rename(machine[1] / "elsewhere")
    done = _run(machine, *command)
    assert done.returncode == 2
    assert done.stdout.startswith("missing Python packages: tokenizers, ")
    assert "python -m engine.bench.pack" in done.stdout
    assert done.stderr == ""

    (machine[1] / "elsewhere").rename(wheels)
    done = _run(machine, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((out / "results.json").read_text())
    assert {figures["status"] for figures in content["figures"].values()} == {"measured"}
    assert sum(content["replays"].values()) == 10
    assert content["replays"]["unequal"] == 0
    assert {each["status"] for each in content["tests"].values()} == {"passed", "skipped"}
    assert "wheels of .gpu-wheels/, as tokenizers, " in (out / "progress.txt").read_text()
    report = (out / "report.md").read_text()
    assert "| tiny transformers continuous batching, 4 sequences" in report
    assert "| block_copy copy 8b 512 blocks " in report
    assert {file.name for file in out.iterdir()} == {
        *("results.json", "report.md", "failures.txt", "progress.txt")
    }
