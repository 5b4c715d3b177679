"""Which files import which, read from their source: also inside functions and for types alone.

And how long they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kernels", "client", "model_repository")
# A soft limit: one concept per file matters, its length does not. A function fits a screen.
MAX_LINES = 600

# The computation imports only what is to its left, and nothing of the processes around it.
_LAYERED = (
    "engine.layers",
    "engine.quantization",
    "engine.models",
    "engine.weights",
    "engine.execution",
)
_AROUND = ("engine.service", "engine.launch", "engine.offline", "engine.bench")

# Package -> what its files must not import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "engine": ("client", "model_repository"),
    "engine.core": _AROUND,
    "engine.request": (*_LAYERED, *_AROUND, "engine.core"),
    "engine.text": (*_LAYERED, *_AROUND, "engine.core", "engine.request"),
    "engine.validation": (*_LAYERED, *_AROUND, "engine.core", "engine.request", "engine.text"),
    "engine.execution": _AROUND,
    "engine.weights": ("engine.execution", "engine.core", *_AROUND),
    "engine.models": ("engine.weights", "engine.execution", "engine.core", *_AROUND),
    # The names of tensors in a GGUF file are those of the model's modules.
    "engine.checkpoint": (
        *(package for package in _LAYERED if package != "engine.models"),
        *_AROUND,
        "engine.core",
    ),
    "engine.checkpoint.tensor_files": (*_LAYERED, *_AROUND, "engine.core"),
    "engine.quantization": ("engine.weights", "engine.execution", "engine.core", *_AROUND),
    "engine.layers": (*_LAYERED[1:], "engine.core", "engine.config", *_AROUND),
    # Code of one process is not imported by another; what they share lies beside these packages.
    "engine.service.stages": ("engine.service.stub", "engine.service.process"),
    "engine.service.stub": ("engine.service.stages", "engine.service.process"),
    "engine.service.process": ("engine.service.stages", "engine.service.stub"),
    "kernels": ("engine", "client", "model_repository"),
    "model_repository": ("client", "kernels", *_LAYERED, "engine.core"),
    # The library; what the commands and the benchmarks may import is said below.
    "client": ("engine", "kernels", "model_repository"),
    "client.commands": ("kernels", *_LAYERED, "engine.core", "engine.service"),
    "client.bench": ("kernels", *_LAYERED),
}
# Parts of a package with a rule of their own in place of the package's.
_EXEMPT = ("client.commands", "client.bench", "client.cli")


def _modules() -> dict[str, Path]:
    modules: dict[str, Path] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imported(path: Path) -> Iterator[str]:
    """Yield every name that a file imports, whether it is a module or something in one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(name: str, modules: dict[str, Path]) -> str | None:
    """Return the file that `name` is, or is defined in; None if it is not ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


MODULES = _modules()
GRAPH = {
    module: {_module_of(name, MODULES) for name in _imported(path)} - {None, module}
    for module, path in MODULES.items()
}


def test_no_circle_of_files() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))
    assert len(GRAPH) > 200  # they have been found


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    members = [
        module
        for module in GRAPH
        if _is_in(module, package)
        and not any(_is_in(module, part) for part in _EXEMPT if part != package)
    ]
    assert members
    wrong = [
        f"{module} imports {name}"
        for module in members
        for name in sorted(filter(None, GRAPH[module]))
        if any(_is_in(name, forbidden) for forbidden in FORBIDDEN[package])
    ]
    assert not wrong


def test_no_file_is_long() -> None:
    sources = (
        *MODULES.values(),
        *(ROOT / "kernels/cpu/csrc").iterdir(),
        *(ROOT / "tests").rglob("*.py"),
    )
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources
    }
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}
