"""Which files import which, read from their source: also inside functions and for types alone.

And how long they are.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
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


def imported(path: Path) -> Iterator[str]:
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
    module: {_module_of(name, MODULES) for name in imported(path)} - {None, module}
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


# Folders whose files are entries of one list: each family, scheme, kernel or parser has one.
_REGISTRIES = (
    "engine/models/families",
    "engine/quantization",
    "kernels/state",
    "client/gateway/tool_parsers",
    "client/gateway/routes",
)
# What a process starts with: no other file imports it. And the routes of each API of the gateway,
# with what serves them.
_ENTRIES = re.compile(
    r"model_repository\..*|client\.cli|client\.commands\..*|.*\.worker"
    r"|client\.gateway\.\w+\.(router|serving(_\w+)?)"
)
_MAIN = 'if __name__ == "__main__":'  # of what `python -m` starts
_MAX_FILES = 22
_MAX_IMPORTS = 20
# Classes of one name in packages that one process loads; the other packages run in other processes.
_PROCESSES = (("engine", "kernels"), ("client.gateway",), ("client.bench", "client.commands"))


def _exceptions(rule: str) -> set[str]:
    """Return what a rule does not hold for yet; the lists only shrink."""
    text = (ROOT / "tests/house/exceptions.toml").read_text(encoding="utf-8")
    return set(tomllib.loads(text)[rule])


def _assert_no_new(rule: str, found: set[str]) -> None:
    known = _exceptions(rule)
    assert found - known == set(), f"new exceptions of the rule {rule}"
    assert known - found == set(), f"no exception any more: remove it from {rule}"


def test_file_has_two_importers_or_a_reason() -> None:
    importers = Counter(each for imported in GRAPH.values() for each in imported)
    alone = {
        module
        for module, path in MODULES.items()
        if importers[module] < 2
        and path.stem not in ("__init__", "__main__")
        and str(path.parent.relative_to(ROOT)) not in _REGISTRIES
        and not _ENTRIES.fullmatch(module)
        and _MAIN not in path.read_text(encoding="utf-8")
    }
    _assert_no_new("one_importer", alone)


def test_folder_has_no_more_files_than_a_reader_surveys() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES.values())
    full = {folder for folder, count in counts.items() if count > _MAX_FILES}
    _assert_no_new("full_folders", full - set(_REGISTRIES))


def test_file_imports_no_more_files_than_a_reader_follows() -> None:
    _assert_no_new("many_imports", {m for m, names in GRAPH.items() if len(names) > _MAX_IMPORTS})


def test_public_class_name_is_unique_in_its_process() -> None:
    twice = set()
    for packages in _PROCESSES:
        names = Counter(
            node.name
            for module, path in MODULES.items()
            if module.startswith(packages)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        )
        twice |= {name for name, count in names.items() if count > 1}
    _assert_no_new("class_names", twice)
