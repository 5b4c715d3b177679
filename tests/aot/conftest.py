"""`--resources FILE.md` writes the table of what every kernel takes of each GPU."""

from pathlib import Path

import pytest

from tests.aot import resources


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--resources", type=Path, metavar="FILE.md", help="write the kernels' resources to FILE.md"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--resources", default=None)
    if file is not None:
        file.write_text(resources.markdown(resources.collected))
