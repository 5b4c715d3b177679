"""What the wheel holds: the product alone, without the harness and the tests of a checkout."""

from __future__ import annotations

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.test_imports import GRAPH, MODULES, ROOT, imported


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """The modules in the wheel."""
    files = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    found = {m for m, path in MODULES.items() if str(path.relative_to(ROOT)) in files}
    python = {file for file in files if file.endswith(".py")}
    assert python == {str(MODULES[module].relative_to(ROOT)) for module in found}, "not ours"
    return found


def test_wheel_leaves_out_the_harness_alone(modules: set[str]) -> None:
    left_out = {module for module in MODULES if module.startswith("engine.bench")}
    assert left_out
    assert modules == MODULES.keys() - left_out


def test_wheel_imports_nothing_that_it_leaves_out(modules: set[str]) -> None:
    wrong = {module: GRAPH[module] - modules for module in modules if GRAPH[module] - modules}
    of_tests = {
        module
        for module in modules
        if any(name.split(".")[0] == "tests" for name in imported(MODULES[module]))
    }
    assert wrong == {}
    assert of_tests == set()
