"""Structured output beside plain streams: a short version of `grammars`."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.resilience.grammars import SETTINGS, measure
from tests.server.resilience.service import serving

LONGEST_S = 5.0  # how short gaps are on a quiet machine, `grammars` measures


@pytest.mark.server
@pytest.mark.large
def test_documents_are_valid_and_no_stream_waits_beside_any_grammar() -> None:
    with serving(**SETTINGS) as server:
        assert asyncio.run(measure(server, seconds=3, longest_s=LONGEST_S)) == []
