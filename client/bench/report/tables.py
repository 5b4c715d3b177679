"""The results as tables for a terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from client.bench.measure.measurement import DISTURBED
from client.bench.report.results import Bounds, Percentiles, Results, Row


def table(results: Results, bounds: Bounds) -> Table:
    """Return the table of all workloads and servers."""
    ratio = escape(f"{', '.join(results.tridents)} to it; " if results.tridents else "")
    shown = Table(
        title="Servers on the same cores, one after the other",
        caption=(
            f"tok/s: median, min-max; ratio: {ratio}times: ms, p50, p90 and p99; user: tok/s of a "
            f"user, p50, p10 and p1; goodput: requests/s within {bounds.ttft:g} s to the first "
            f"token and {bounds.token_time:g} s per token; fail: requests, refused ones in brackets"
        ),
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    shown.add_column("", max_width=16)
    names = ("tok/s", "ratio", "TTFT", "inter-\ntoken", "latency", "user", "good-\nput", "fail")
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    rows = results.rows(bounds)
    for workload in results.workloads:
        shown.add_section()
        shown.add_row(workload.name)
        for row in (row for row in rows if row.workload == workload.name):
            shown.add_row(f" {escape(row.server)}", *_cells(row, results.tridents))
    return shown


def _cells(row: Row, tridents: Sequence[str]) -> list[str]:
    def times(seconds: Percentiles) -> str:
        return "\n".join(f"{1000 * each:.0f}" for each in seconds)

    return [
        f"{row.speed:.1f}",
        "\n".join(f"{row.ratios[name]:.2f}" if name in row.ratios else "-" for name in tridents),
        times(row.ttft),
        times(row.gap),
        times(row.latency),
        "\n".join(f"{each:.1f}" for each in row.user_speed),
        f"{row.goodput:.2f}",
        f"{row.failed}\n({row.refused})" if row.failed else "0",
    ]


def server_table(results: Results, bounds: Bounds) -> Table:
    """Return the table of what the servers used, and said of themselves."""
    shown = Table(title="The servers", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    shown.add_column("", max_width=26)
    for name in ("mem.\nGB", "start\ns", "others\n%", "queue\nms", "prefix\nhits %"):
        shown.add_column(name, justify="right")
    for name in ("preemp-\ntions", "KV use, waste,\nsaved, %"):
        shown.add_column(name, justify="right")

    def cell(value: float | None, scale: float = 1.0) -> str:
        return "-" if value is None else f"{scale * value:.1f}"

    for row in results.rows(bounds):
        shown.add_row(
            escape(f"{row.workload}, {row.server}"),
            f"{row.memory / 1e9:.2f}",
            f"{row.start:.1f}",
            f"{100 * row.others:.1f}{'*' if row.is_disturbed else ''}",
            cell(row.queue, 1000),
            cell(row.prefix_hits, 100),
            cell(row.preemptions),
            ", ".join(cell(each, 100) for each in (row.kv_use, row.kv_waste, row.kv_saved)),
        )
    return shown


def cpu_table(results: Results, bounds: Bounds) -> Table:
    """Return the table of what the tokens cost."""
    shown = Table(title="What 1,000 tokens cost", box=box.SIMPLE, pad_edge=False)
    shown.add_column("", max_width=26)
    shown.add_column("tokens per\nresponse", justify="right")
    shown.add_column("CPU seconds, by process")
    for row in results.rows(bounds):
        cost = "\n".join(f"{name} {used:.3f}" for name, used in row.cpu.items())
        if row.gpu_use is not None:
            cost += f"\nGPUs busy {row.gpu_use:.0%}, {row.joules:.0f} J"
        shown.add_row(
            escape(f"{row.workload}, {row.server}"), f"{row.tokens_per_response:.2f}", cost
        )
    return shown


def notes(results: Results, rounds: int) -> str:
    """Return what one must know to read the tables."""
    stolen = max((one.stolen for one in results.all_measured()), default=0.0)
    lines = [f"{each.name}: {each.description}" for each in results.workloads]
    lines.append(
        f"{len(os.sched_getaffinity(0))} cores. Medians of {rounds} rounds at most. Above "
        f"{DISTURBED:.0%} of other programs (*) a run is repeated; the host of this machine took "
        f"{stolen:.1%} at most. Latencies count from the time at which a request should have been "
        "sent; inter-token is the time between two responses of a stream; start is the time to the "
        "first token of a first request; memory is that of all processes of the server."
    )
    lines += [
        f"{name} has not all its figures: {failure.splitlines()[0]}"
        for name, failure in results.failures.items()
    ]
    return "\n".join(lines)
