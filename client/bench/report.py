"""Summaries of waves: medians and spreads over rounds, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.table import Table

from client.bench.measurement import Wave


@dataclass(frozen=True)
class Spread:
    """The median of some figures, with the smallest and the largest."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise `values`, which must not be empty."""
        return cls(median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        low, middle, high = (format(v, spec) for v in (self.min, self.median, self.max))
        return f"{middle}\n{low}-{high}"


@dataclass(frozen=True)
class Row:
    """The figures of one number of streams. Times in seconds, CPU in seconds per 1000 tokens.

    Attributes:
        engine, ensemble: output tokens per second of each wave.
        ratio: ensemble to engine alone, per round, so that machine load cancels.
        ttft, gap: p50 and p99 over all requests, and over all pairs of consecutive responses.
        tokens_per_response: mean.
        engine_cpu, ensemble_cpu: by process.
    """

    streams: int
    engine: Spread
    ensemble: Spread
    ratio: Spread
    ttft: tuple[float, float]
    gap: tuple[float, float]
    tokens_per_response: float
    engine_cpu: dict[str, float]
    ensemble_cpu: dict[str, float]


@dataclass(frozen=True)
class Round:
    """The waves of one number of streams in one round."""

    engine: list[Wave]
    ensemble: list[Wave]


def row(streams: int, rounds: Sequence[Round]) -> Row:
    """Summarise the rounds of one number of streams."""
    engine = [wave for each in rounds for wave in each.engine]
    ensemble = [wave for each in rounds for wave in each.ensemble]
    return Row(
        streams=streams,
        engine=Spread.of([wave.tokens_per_second for wave in engine]),
        ensemble=Spread.of([wave.tokens_per_second for wave in ensemble]),
        ratio=Spread.of([throughput(each.ensemble) / throughput(each.engine) for each in rounds]),
        ttft=p50_p99([ttft for wave in ensemble for ttft in wave.ttfts]),
        gap=p50_p99([gap for wave in ensemble for gap in wave.gaps]),
        tokens_per_response=(
            sum(wave.num_tokens for wave in ensemble) / sum(wave.num_responses for wave in ensemble)
        ),
        engine_cpu=cpu_per_1000_tokens(engine),
        ensemble_cpu=cpu_per_1000_tokens(ensemble),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of `values`, interpolated as numpy does; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def throughput_table(rows: Sequence[Row]) -> Table:
    """Return the table of tokens per second and latencies."""
    table = Table(
        title="Engine alone and through the ensemble",
        caption="tok/s and ratio: median, min-max; times: p50, p99",
    )
    for name in (
        "streams",
        "alone\ntok/s",
        "ensemble\ntok/s",
        "ratio",
        "TTFT\nms",
        "inter-\ntoken ms",
        "tokens /\nresponse",
    ):
        table.add_column(name, justify="right")
    for each in rows:
        table.add_row(
            str(each.streams),
            f"{each.engine:.0f}",
            f"{each.ensemble:.0f}",
            f"{each.ratio:.2f}",
            milliseconds(each.ttft),
            milliseconds(each.gap),
            f"{each.tokens_per_response:.2f}",
        )
    return table


def cpu_table(rows: Sequence[Row]) -> Table:
    """Return the table of CPU seconds per 1000 output tokens, by process."""
    table = Table(title="CPU seconds per 1000 output tokens")
    table.add_column("process")
    for each in rows:
        table.add_column(f"{each.streams} streams", justify="right")
    names = list(dict.fromkeys(name for each in rows for name in each.engine_cpu))
    for name in names:
        table.add_row(f"{name}, alone", *_cpu_cells([each.engine_cpu for each in rows], name))
    table.add_section()
    for name in dict.fromkeys(name for each in rows for name in each.ensemble_cpu):
        table.add_row(name, *_cpu_cells([each.ensemble_cpu for each in rows], name))
    return table


def as_json(rows: Sequence[Row], rounds: dict[int, list[Round]]) -> dict[str, object]:
    """Return everything that was measured, as plain data."""
    return {
        "summary": [asdict(each) for each in rows],
        "rounds": {str(n): [asdict(each) for each in measured] for n, measured in rounds.items()},
    }


def throughput(waves: Sequence[Wave]) -> float:
    """Return the median of the tokens per second."""
    return median(wave.tokens_per_second for wave in waves)


def p50_p99(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    return percentile(values, 50), percentile(values, 99)


def cpu_per_1000_tokens(waves: Sequence[Wave]) -> dict[str, float]:
    """Return CPU seconds per 1000 output tokens, by process."""
    thousands = sum(wave.num_tokens for wave in waves) / 1000
    names = dict.fromkeys(name for wave in waves for name in wave.cpu_seconds)
    return {
        name: sum(wave.cpu_seconds.get(name, 0.0) for wave in waves) / thousands for name in names
    }


def milliseconds(seconds: tuple[float, float]) -> str:
    """Return both as milliseconds, one below the other."""
    return "\n".join(f"{1000 * value:.1f}" for value in seconds)


def _cpu_cells(columns: Sequence[dict[str, float]], name: str) -> list[str]:
    return [f"{column.get(name, 0.0):.3f}" for column in columns]
