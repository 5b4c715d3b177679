"""The rows of the benchmark's table of kernels, for given figures."""

from typing import Any

import pytest

from kernels.bench import table
from kernels.bench.case import Aim
from tests.kernels.bench_support import CEILINGS, fake_case, figures_of

KERNEL = {
    "kernel": "x.f",
    "registers": 168,
    "spills": 0,
    "shared": 1024,
    "num_warps": 4,
    "num_stages": 3,
    "resident_warps": 12,
    "most_warps": 64,
}


def test_aims() -> None:
    assert Aim(share=0.85).met(1.0, 0.85)
    assert not Aim(share=0.85).met(1.0, 0.84)
    assert not Aim(share=0.85).met(1.0, None)
    assert Aim(micros=250).met(250.0, None)
    assert not Aim(micros=250).met(251.0, 0.99)
    assert [str(Aim(share=0.85)), str(Aim(micros=250))] == [">= 85%", "<= 250 us"]


PEERS = {
    "slow": {"micros": 40.0},
    "fast": {"micros": 15.0},
    "broken": {"reason": "NotImplementedError: no"},
}


@pytest.mark.parametrize(
    ("aim", "figures", "cells"),
    [
        (
            Aim(share=0.85),
            figures_of(10.0, bytes=36_000_000, peers=PEERS),
            ("10.0", "3600 GB/s", "90%", "fast", "15.0", "1.50x", ">= 85%", "met"),
        ),
        (
            Aim(share=0.85),
            figures_of(20.0, bytes=36_000_000),
            ("20.0", "1800 GB/s", "45%", "", "", "", ">= 85%", "MISSED"),
        ),
        (
            None,
            figures_of(2000.0, flops=800_000_000_000),
            ("2000", "400 TF/s", "50%", "", "", "", "", ""),
        ),
    ],
)
def test_a_row_holds_figures_against_ceilings_peers_and_aims(
    aim: Aim | None, figures: dict[str, Any], cells: tuple[str, ...]
) -> None:
    row = table.row(fake_case("a", aim), figures, CEILINGS)
    assert row == ("rms_norm a", *cells)
    assert len(row) == len(table.HEADER)


def test_peers_without_a_time_and_kernels_below_their_aim_are_remarked_on() -> None:
    figures = figures_of(20.0, bytes=36_000_000, peers=PEERS, kernels=[KERNEL])
    lines = table.remarks(fake_case("a", Aim(share=0.85)), figures, CEILINGS)
    assert lines[0] == "rms_norm a: broken: NotImplementedError: no"
    assert lines[1].startswith("rms_norm a: x.f: 168 registers, 0 spilled, 1024 B shared, 4 warps")
    assert len(table.remarks(fake_case("a", Aim(share=0.4)), figures, CEILINGS)) == 1


def test_results_that_differ_from_torchs_are_disputed() -> None:
    assert table.disputed(figures_of(1.0, peers={"torch": {"differs": "shapes"}}))
    assert not table.disputed(figures_of(1.0, peers=PEERS))
    assert not table.disputed({"status": "left out", "reason": "no time was left"})


def test_a_table_is_markdown_with_aligned_columns() -> None:
    lines = table.markdown([("", "us", "aim"), ("a long name", "10.5", "met")], text=(0, 2))
    assert lines == [
        "|             |   us | aim |",
        "| ----------- | ---: | --- |",
        "| a long name | 10.5 | met |",
    ]
