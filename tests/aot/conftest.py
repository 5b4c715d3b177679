"""Kernels are compiled for sm_90; for the other GPUs by `make test-all`.

`--resources FILE.md` writes a table of every kernel's resources on each GPU.
"""

from pathlib import Path

import pytest

from tests.aot import resources

DEFAULT_GPU = "sm_90"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--resources", type=Path, metavar="FILE.md", help="write the kernels' resources to FILE.md"
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            gpu = item.callspec.params.get("gpu", DEFAULT_GPU)
            if gpu != DEFAULT_GPU:
                item.add_marker(pytest.mark.large)


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--resources", default=None)
    if file is not None:
        file.write_text(resources.markdown(resources.collected))
