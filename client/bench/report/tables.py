"""Tables for a terminal: of a run, and of the differences of two that were saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from client.bench.errors import BenchError
from client.bench.measure.measurement import DISTURBED
from client.bench.report.results import Row


def tables(found: dict[str, Any], rounds: int) -> list[RenderableType]:
    """Return what is shown of a run: three tables, and what one must know to read them.

    Args:
        found: as of `as_json`.
    """
    return [
        _speeds(found),
        _servers(found["summary"]),
        _costs(found["summary"]),
        _notes(found, rounds),
    ]


def _speeds(found: dict[str, Any]) -> Table:
    tridents, bounds = found["tridents"], found["bounds"]
    ratio = escape(f"{', '.join(tridents)} to it; " if tridents else "")
    shown = _table(
        "Servers on the same cores, one after the other",
        *("tok/s", "ratio", "TTFT", "inter-\ntoken", "latency", "user", "good-\nput", "fail"),
        width=16,
    )
    shown.caption = (
        f"tok/s: median, min-max; ratio: {ratio}times: ms, p50, p90 and p99; user: tok/s of a "
        f"user, p50, p10 and p1; goodput: requests/s within {bounds['ttft']:g} s to the first "
        f"token and {bounds['token_time']:g} s per token; fail: requests, refused ones in brackets"
    )
    for workload in found["workloads"]:
        shown.add_section()
        shown.add_row(workload["name"])
        for row in (row for row in found["summary"] if row["workload"] == workload["name"]):
            speed, ratios = row["speed"], row["ratios"]
            shown.add_row(
                f" {escape(row['server'])}",
                f"{speed['median']:.1f}\n{speed['min']:.1f}-{speed['max']:.1f}",
                "\n".join(f"{ratios[each]:.2f}" if each in ratios else "-" for each in tridents),
                *("\n".join(f"{1e3 * s:.0f}" for s in row[k]) for k in ("ttft", "gap", "latency")),
                "\n".join(f"{each:.1f}" for each in row["user_speed"]),
                f"{row['goodput']:.2f}",
                f"{row['failed']}\n({row['refused']})" if row["failed"] else "0",
            )
    return shown


def _servers(rows: list[Row]) -> Table:
    """Return the table of what the servers used, and said of themselves."""
    names = ("mem.\nGB", "start\ns", "others\n%", "queue\nms", "prefix\nhits %", "preemp-\ntions")
    shown = _table("The servers", *names, "KV use, waste,\nsaved, %")

    def cell(value: float | None, scale: float = 1.0) -> str:
        return "-" if value is None else f"{scale * value:.1f}"

    for row in rows:
        shown.add_row(
            _name(row),
            f"{row['memory'] / 1e9:.2f}",
            f"{row['start']:.1f}",
            f"{100 * row['others']:.1f}{'*' if row['is_disturbed'] else ''}",
            cell(row["queue"], 1000),
            cell(row["prefix_hits"], 100),
            cell(row["preemptions"]),
            ", ".join(cell(row[each], 100) for each in ("kv_use", "kv_waste", "kv_saved")),
        )
    return shown


def _costs(rows: list[Row]) -> Table:
    shown = _table("What 1,000 tokens cost", "tokens per\nresponse")
    shown.add_column("CPU seconds, by process")
    for row in rows:
        cost = "\n".join(f"{name} {used:.3f}" for name, used in row["cpu"].items())
        if row["gpu_use"] is not None:
            cost += f"\nGPUs busy {row['gpu_use']:.0%}, {row['joules']:.0f} J"
        shown.add_row(_name(row), f"{row['tokens_per_response']:.2f}", cost)
    return shown


def _table(title: str, *columns: str, width: int = 26) -> Table:
    shown = Table(title=title, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    shown.add_column("", max_width=width)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def _name(row: Row) -> str:
    return escape(f"{row['workload']}, {row['server']}")


def _notes(found: dict[str, Any], rounds: int) -> str:
    def lines() -> Iterator[str]:
        yield from (f"{each['name']}: {each['text']}" for each in found["workloads"])
        stolen = max((row["stolen"] for row in found["summary"]), default=0.0)
        yield (
            f"{found['cores']} cores. Medians of {rounds} rounds at most. Above {DISTURBED:.0%} of "
            f"other programs (*) a run is repeated; the host of this machine took {stolen:.1%} at "
            "most. Latencies count from the time at which a request should have been sent; "
            "inter-token is the time between two responses of a stream; start is the time to the "
            "first token of a first request; memory is that of all processes of the server."
        )
        for name, failure in found["failures"].items():
            yield f"{name} has not all its figures: {failure.splitlines()[0]}"

    return "\n".join(lines())


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return whether the rounds of two runs differ: only if none of one is within the other's."""
    if len(before) < 2 or len(after) < 2:
        return "one round: unknown"
    if max(before) < min(after) or max(after) < min(before):
        return "differs"
    return "noise"


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a saved run, by workload and server.

    Raises:
        BenchError: it is none.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["summary"]
        return {(row["workload"], row["server"]): row["rounds"] for row in rows}
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(
            f"{path} is not a results file that --json of trident bench writes"
        ) from None


def differences(before: Path, after: Path) -> Table:
    """Return the differences of what both have measured.

    Raises:
        BenchError: a file cannot be read, or they have nothing in common.
    """
    old, new = _read(before), _read(after)
    both = [key for key in old if key in new]
    if not both:
        raise BenchError(f"{before} and {after} have no workload of one server in common")
    shown = Table(
        title=f"{before.name} to {after.name}",
        caption="medians; noise: the rounds of the two runs overlap",
        box=box.SIMPLE,
    )
    for name in ("", "before", "after", "ratio", ""):
        shown.add_column(name, justify="right" if name else "left")
    for key in both:
        shown.add_section()
        shown.add_row(", ".join(key))
        for metric, values in old[key].items():
            now = new[key].get(metric)
            if not now:
                continue
            was, is_now = median(values), median(now)
            ratio = f"{is_now / was:.2f}" if was else "-"
            shown.add_row(f"  {metric}", f"{was:.4g}", f"{is_now:.4g}", ratio, verdict(values, now))
    return shown
