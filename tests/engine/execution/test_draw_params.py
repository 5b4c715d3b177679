"""Which steps have filters, so that kernels are launched for them."""

from __future__ import annotations

import numpy as np
import pytest

from engine.execution.sampling.draw import DrawParams

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def params(*rows: dict[str, float]) -> DrawParams:
    columns = {name: np.array([{**PLAIN, **row}[name] for row in rows]) for name in PLAIN}
    numbers = np.arange(len(rows))
    return DrawParams(**columns, seeds=numbers.astype(np.uint64), positions=numbers)


@pytest.mark.parametrize("row", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_one_row_with_a_filter_is_enough(row: dict[str, float]) -> None:
    assert params({}, row).has_filters
    assert not params({}, {**row, "temperature": 0.0}).has_filters, "greedy rows take the maximum"


def test_plain_rows_have_none() -> None:
    assert not params({}, {"temperature": 0.0}, {"temperature": 0.5}).has_filters
