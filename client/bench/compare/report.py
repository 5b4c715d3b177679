"""The results as a table and as JSON: medians over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from client.bench.compare.ceilings import Ceilings
from client.bench.compare.floors import Floor
from client.bench.compare.measurement import Measurement
from client.bench.compare.workload import Workload
from client.bench.report import Spread, milliseconds, p50_p99


@dataclass
class Session:
    """One server's results from start to exit.

    Attributes:
        start_seconds: from launch to the first token.
        measurements: by name of the workload.
    """

    start_seconds: float
    measurements: dict[str, Measurement] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Results of one workload on one server. Times in seconds, memory in bytes.

    Attributes:
        speed: output tokens per second, over the rounds.
        ratios: tokens per second of each Trident relative to this server's, over the rounds that
            both completed. Each ratio is within one round, so that machine load cancels.
        of_floor: `speed` as a share of the bf16 upper bound.
        ttft, gap: p50 and p99 over all requests, and over all pairs of consecutive responses.
        memory: the median.
        start: the median; the same for all workloads of a server.
        others: share of the cores' time used by other programs: the largest of the rounds.
        is_disturbed: whether that is too much to trust the figures.
    """

    workload: str
    server: str
    speed: Spread
    ratios: dict[str, float]
    of_floor: float
    ttft: tuple[float, float]
    gap: tuple[float, float]
    memory: float
    start: float
    others: float
    is_disturbed: bool


@dataclass
class Results:
    """All results of a comparison.

    Attributes:
        tridents: the servers that ratios are relative to.
        sessions: by server and round; None if it failed, fewer if interrupted.
        failures: by server, why figures are missing.
        interrupted: whether the run ended before all rounds were measured.
    """

    workloads: Sequence[Workload]
    tridents: Sequence[str]
    ceilings: Ceilings
    floors: Mapping[str, Floor]
    sessions: dict[str, list[Session | None]]
    failures: dict[str, str]
    interrupted: bool = False

    def rows(self) -> list[Row]:
        """Return one row per workload and server measured together."""
        rows = (
            self._row(workload.name, server)
            for workload in self.workloads
            for server in self.sessions
        )
        return [row for row in rows if row is not None]

    @property
    def stolen(self) -> float:
        """The largest share of the cores' time taken by the host in a run."""
        return max(
            (
                one.stolen
                for sessions in self.sessions.values()
                for session in sessions
                if session is not None
                for one in session.measurements.values()
            ),
            default=0.0,
        )

    def _measured(self, workload: str, server: str) -> dict[int, Measurement]:
        """Return the measurements by round."""
        return {
            number: session.measurements[workload]
            for number, session in enumerate(self.sessions[server])
            if session is not None and workload in session.measurements
        }

    def _row(self, workload: str, server: str) -> Row | None:
        by_round = self._measured(workload, server)
        measured = list(by_round.values())
        if not measured:
            return None
        speed = Spread.of([one.tokens_per_second for one in measured])
        return Row(
            workload=workload,
            server=server,
            speed=speed,
            ratios=self._ratios(workload, by_round),
            of_floor=speed.median / self.floors[workload].bf16,
            ttft=p50_p99([ttft for one in measured for ttft in one.ttfts]),
            gap=p50_p99([gap for one in measured for gap in one.gaps]),
            memory=median(one.memory for one in measured),
            start=median(each.start_seconds for each in self.sessions[server] if each is not None),
            others=max(one.others for one in measured),
            is_disturbed=any(one.is_disturbed for one in measured),
        )

    def _ratios(self, workload: str, by_round: Mapping[int, Measurement]) -> dict[str, float]:
        ratios = {}
        for trident in self.tridents:
            theirs = self._measured(workload, trident)
            both = [
                theirs[number].tokens_per_second / one.tokens_per_second
                for number, one in by_round.items()
                if number in theirs
            ]
            if both:
                ratios[trident] = median(both)
        return ratios

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "summary": [asdict(row) for row in self.rows()],
            "workloads": [asdict(workload) for workload in self.workloads],
            "ceilings": asdict(self.ceilings),
            "floors": {name: asdict(floor) for name, floor in self.floors.items()},
            "rounds": {
                server: [None if each is None else asdict(each) for each in sessions]
                for server, sessions in self.sessions.items()
            },
            "failures": self.failures,
            "interrupted": self.interrupted,
        }


def table(results: Results) -> Table:
    """Return the table of all workloads and servers; it fits 80 columns."""
    ratio = escape(f"{', '.join(results.tridents)} to it")
    shown = Table(
        title="Servers on the same cores, one after the other",
        caption=(
            f"tok/s: median, min-max; ratio: {ratio}; TTFT and inter-token: ms, p50 and p99; "
            "others: CPU time of other programs, * is too much"
        ),
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    shown.add_column("", max_width=14)
    for name in (
        "tok/s",
        "ratio",
        "of\nfloor",
        "TTFT",
        "inter-\ntoken",
        "mem.\nGB",
        "start\ns",
        "others\n%",
    ):
        shown.add_column(name, justify="right", no_wrap=True)
    rows = results.rows()
    for workload in results.workloads:
        floor = results.floors[workload.name]
        shown.add_section()
        shown.add_row(f"{workload.name} floor bf16", f"{floor.bf16:.0f}")
        shown.add_row("   floor int8", f"{floor.int8:.0f}")
        for row in (row for row in rows if row.workload == workload.name):
            shown.add_row(f" {escape(row.server)}", *_cells(row, results.tridents))
    return shown


def _cells(row: Row, tridents: Sequence[str]) -> list[str]:
    return [
        f"{row.speed:.1f}",
        "\n".join(f"{row.ratios[name]:.2f}" if name in row.ratios else "-" for name in tridents),
        f"{row.of_floor:.2f}",
        milliseconds(row.ttft),
        milliseconds(row.gap),
        f"{row.memory / 1e9:.2f}",
        f"{row.start:.1f}",
        f"{100 * row.others:.1f}{'*' if row.is_disturbed else ''}",
    ]
