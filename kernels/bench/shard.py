"""A pytest plugin: `--shard 1/3` runs every third test, starting with the second."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="I/N", help="run tests I, I + N, ...")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Adjacent tests are similar and take similar time: round-robin balances the shards.
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index::count]
