"""Figures of streams at a set rate, as tables and as sentences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.table import Table

from client.bench.cpu import CLIENT, OTHERS, STOLEN
from client.bench.errors import BenchError

_BUSY = 0.8  # share of the time from which a load generator may be the limit

# Stream, `time.monotonic()` second, number of tokens, and whether these are its last.
Arrivals = Sequence[tuple[int, float, int, bool]]


@dataclass(frozen=True)
class Figures:
    """What a number of streams got, in a window of time in which all of them ran.

    Attributes:
        intended: tokens per second if each stream gets one per step.
        tokens_per_second: tokens that arrived.
        tokens_per_response: mean.
        gap: p50 and p99 of the seconds between two responses of a stream, over the moments at which
            a token was due: a pause counts as often as it made a token wait. So one that does not
            end within the window counts too.
        cpu_per_1000_tokens, cpu_per_response: seconds by process.
        generator_busy: share of a core that the busiest load generator used.
        generator_waited: share of the time that it was ready to run, but had no core.
        cores_used: by all processes here, of the number of cores.
    """

    streams: int
    intended: float
    tokens_per_second: float
    tokens_per_response: float
    gap: tuple[float, float]
    cpu_per_1000_tokens: dict[str, float]
    cpu_per_response: dict[str, float]
    generator_busy: float
    generator_waited: float
    cores_used: float


def gap_percentiles(
    arrivals: Arrivals, streams: int, begin: float, end: float, percents: Sequence[float]
) -> list[float]:
    """Return percentiles of the gaps between responses, weighted by their part of the window."""
    by_stream: list[list[float]] = [[] for _ in range(streams)]
    for stream, at, _, _ in arrivals:
        by_stream[stream].append(at)
    weighted = []
    for times in by_stream:
        # The last gap is open: it is at least as long as the rest of the window.
        inside = [at for at in times if at < end]
        for early, late in pairwise([*inside, end]):
            if late > begin:
                weighted.append((late - early, late - max(early, begin)))
    weighted.sort()
    gaps = [gap for gap, _ in weighted]
    shares = list(accumulate(weight for _, weight in weighted))
    return [gaps[bisect_left(shares, shares[-1] * percent / 100)] for percent in percents]


def figures(
    arrivals: Arrivals,
    streams: int,
    begin: float,
    end: float,
    *,
    step_s: float,
    cpu: dict[str, float],
    generator_waited: float,
) -> Figures:
    """Summarise what arrived between `begin` and `end`.

    Args:
        cpu: seconds by process.
        generator_waited: seconds that the load generator was ready to run without a core.

    Raises:
        BenchError: nothing arrived.
    """
    seconds = end - begin
    inside = [count for _, at, count, _ in arrivals if begin <= at < end]
    if not inside:
        raise BenchError("nothing arrived while it was measured")
    num_tokens = sum(inside)
    p50, p99 = gap_percentiles(arrivals, streams, begin, end, (50, 99))
    own = {name: used for name, used in cpu.items() if name not in (OTHERS, STOLEN)}
    return Figures(
        streams=streams,
        intended=streams / step_s,
        tokens_per_second=num_tokens / seconds,
        tokens_per_response=num_tokens / len(inside),
        gap=(p50, p99),
        cpu_per_1000_tokens={name: 1000 * used / num_tokens for name, used in own.items()},
        cpu_per_response={name: used / len(inside) for name, used in own.items()},
        generator_busy=cpu[CLIENT] / seconds,
        generator_waited=generator_waited / seconds,
        cores_used=sum(cpu.values()) / seconds,
    )


def rate_table(rows: Sequence[Figures]) -> Table:
    """Return the table of rates and gaps."""
    table = Table(title="The stages at a set rate", caption="gap: between responses, p50 and p99")
    for name in ("streams", "due\ntok/s", "got\ntok/s", "share", "gap ms\np50", "gap ms\np99"):
        table.add_column(name, justify="right")
    table.add_column("tokens /\nresponse", justify="right")
    table.add_column("cores\nused", justify="right")
    for each in rows:
        table.add_row(
            str(each.streams),
            f"{each.intended:.0f}",
            f"{each.tokens_per_second:.0f}",
            f"{each.tokens_per_second / each.intended:.2f}",
            *(f"{1000 * gap:.0f}" for gap in each.gap),
            f"{each.tokens_per_response:.1f}",
            f"{each.cores_used:.2f}",
        )
    return table


def cpu_table(rows: Sequence[Figures]) -> Table:
    """Return the table of CPU time by process."""
    table = Table(title="CPU time", caption="seconds per 1000 tokens, milliseconds per response")
    table.add_column("process")
    for each in rows:
        table.add_column(f"{each.streams}\ns/1000", justify="right")
        table.add_column("ms/\nresponse", justify="right")
    for name in dict.fromkeys(name for each in rows for name in each.cpu_per_response):
        cells: list[str] = []
        for each in rows:
            cells.append(f"{each.cpu_per_1000_tokens.get(name, 0):.3f}")
            cells.append(f"{1000 * each.cpu_per_response.get(name, 0):.3f}")
        table.add_row(name, *cells)
    return table


def limits(rows: Sequence[Figures]) -> list[str]:
    """Return sentences about the generator and the machine, where these may be the limit."""
    found = []
    for each in rows:
        busy, waited = each.generator_busy, each.generator_waited
        if busy + waited > _BUSY:
            found.append(
                f"{each.streams} streams: the load generator used {busy:.0%} of a core and waited "
                f"for one during {waited:.0%} of the time: the figures are those of the machine "
                "with the generator on it, not of the server alone."
            )
    return found
