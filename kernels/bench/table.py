"""Rows of the table of cases: what follows from the figures of a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernels.bench.case import Case

Ceilings = Mapping[str, float | None]

HEADER = ("", "us", "rate", "share", "best of torch", "us", "ratio", "aim", "")
TEXT = (0, 4, 7, 8)  # columns of text, left-aligned; numbers are right-aligned


def judged(case: Case, figures: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """Return what is derived from the figures of a measured case.

    That is its rate, in GB/s or TFLOP/s, the share of the ceiling, the fastest torch
    implementation, and whether its aim is met.
    """
    micros, flops = figures["micros"], figures["flops"]
    rate = flops / micros / 1e6 if flops else figures["bytes"] / micros / 1e3
    ceiling = ceilings.get("bf16_tflop_s" if flops else "copy_gb_s")
    share = rate / ceiling if ceiling and rate else None
    times = {name: peer.get("micros") for name, peer in figures["peers"].items()}
    timed = {name: value for name, value in times.items() if value is not None}
    return {
        "rate": rate,
        "share": share,
        "best_peer": min(timed, key=lambda name: timed[name]) if timed else None,
        "met": case.aim.met(micros, share) if case.aim else None,
    }


def row(case: Case, figures: Mapping[str, Any], ceilings: Ceilings) -> tuple[str, ...]:
    """Return the cells of a measured case, for `HEADER`."""
    found = judged(case, figures, ceilings)
    peer = found["best_peer"]
    theirs = figures["peers"][peer]["micros"] if peer else None
    unit = "TF/s" if figures["flops"] else "GB/s"
    return (
        case.key,
        _number(figures["micros"]),
        f"{found['rate']:.0f} {unit}" if found["rate"] else "",
        f"{found['share']:.0%}" if found["share"] is not None else "",
        peer or "",
        _number(theirs) if theirs else "",
        f"{theirs / figures['micros']:.2f}x" if theirs else "",
        str(case.aim or ""),
        verdict(found["met"]),
    )


def remarks(case: Case, figures: Mapping[str, Any], ceilings: Ceilings) -> list[str]:
    """Return torch implementations without a time, and the kernels of a case below its aim."""
    lines = [
        f"{case.key}: {name}: {peer.get('differs') or peer.get('reason')}"
        for name, peer in figures["peers"].items()
        if "micros" not in peer
    ]
    if judged(case, figures, ceilings)["met"] is False:
        lines += [
            f"{case.key}: {kernel['kernel']}: {kernel['registers']} registers, "
            f"{kernel['spills']} spilled, {kernel['shared']} B shared, "
            f"{kernel['num_warps']} warps, {kernel['num_stages']} stages; "
            f"{kernel['resident_warps']} of {kernel['most_warps']} warps resident"
            for kernel in figures["kernels"]
        ]
    return lines


def disputed(figures: Mapping[str, Any]) -> bool:
    """Return whether a torch implementation gave different results."""
    return any("differs" in peer for peer in figures.get("peers", {}).values())


def verdict(met: bool | None) -> str:
    """Return the text for an aim that is met, missed, or not set."""
    return "" if met is None else "met" if met else "MISSED"


def markdown(rows: Sequence[tuple[str, ...]], text: Sequence[int]) -> list[str]:
    """Return a Markdown table with aligned columns; the first of `rows` is the header.

    Args:
        text: columns that are left-aligned; the others are right-aligned.
    """
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(
            cell.ljust(width) if column in text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    ]
    rule = " | ".join(
        "-" * width if column in text else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    )
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def _number(micros: float) -> str:
    return f"{micros:.1f}" if micros < 1000 else f"{micros:.0f}"
