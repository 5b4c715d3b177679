"""The report: text lines, and a JSON file with everything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.decode import Decode
from engine.bench.offline import Offline
from engine.bench.part import Figures, Part
from engine.bench.parts import Group
from engine.bench.transformers_peer import ContinuousBatching
from kernels.bench.case import Aim
from kernels.bench.report import aligned
from kernels.bench.testing import Outcome

PEER_FACTOR = 5.0  # target speed-up over transformers' continuous batching
_HEADER = ("", "ms", "tok/s", "floor ms", "share", "aim", "")
_LEFT = (0, 5, 6)
_SHOWN = 6  # failures shown per test file; the JSON file has all


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; seconds and shares, or None."""

    name: str
    seconds: float | None = None
    tokens_per_second: float | None = None
    floor_seconds: float | None = None
    share: float | None = None
    aim: str | None = None
    met: bool | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the line's cells."""
        return (
            f"  {self.name}",
            _milliseconds(self.seconds),
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            _milliseconds(self.floor_seconds),
            "" if self.share is None else f"{self.share:.0%}",
            self.aim or "",
            "" if self.met is None else "met" if self.met else "MISSED",
        )


@dataclass(slots=True)
class Report:
    """The results of a run so far.

    Attributes:
        machine: date, GPU, driver and versions.
        judged: whether the figures are compared with the aims.
        warning: what a reader of the figures must know.
        tests: outcome by file.
        ceilings: by model, as measured before its engine.
        figures: by part.
    """

    machine: dict[str, str | None]
    groups: Sequence[Group]
    judged: bool = True
    tests: dict[str, Outcome] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float | None]] = field(default_factory=dict)
    figures: dict[str, Figures] = field(default_factory=dict)
    warning: str | None = None

    @property
    def faulty(self) -> bool:
        """Whether a test failed, or a part that should have been measured was not."""
        return any(found.failed for found in self.tests.values()) or any(
            figures["status"] in ("refused", "failed") for figures in self.figures.values()
        )

    def write_json(self, path: Path) -> None:
        """Write everything to `path`."""
        content = {
            "machine": self.machine,
            "warning": self.warning,
            "tests": {name: asdict(found) for name, found in self.tests.items()},
            "ceilings": self.ceilings,
            "figures": self.figures,
            "rows": {
                group.name: [asdict(row) for row in self._rows(group)] for group in self.groups
            },
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def lines(self) -> list[str]:
        """Return the report as text, ending with the table."""
        return [
            *(f"{name}: {value}" for name, value in self.machine.items()),
            "",
            *self._test_lines(),
            "",
            *(f"ceilings, {name}: {_ceilings(found)}" for name, found in self.ceilings.items()),
            *self._missing(),
            "",
            *([f"WARNING: {self.warning}"] if self.warning else []),
            *self._table(),
        ]

    def _test_lines(self) -> Iterator[str]:
        for name, found in self.tests.items():
            yield (
                f"tests, {name}: {found.passed} passed, {found.failed} failed, {found.skipped} "
                f"skipped, {found.seconds:.0f} s"
            )
            for test, message in found.failures[:_SHOWN]:
                yield f"FAILED {name}: {test}: {message}"

    def _missing(self) -> Iterator[str]:
        for key, figures in self.figures.items():
            if figures["status"] != "measured":
                yield f"{key}: {figures['status']}: {figures['reason']}"

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [_HEADER]
        judged: list[bool] = []
        for group in self.groups:
            found = self._rows(group)
            if found:
                rows.append((f"{group.shape.name}, {group.title}", *[""] * (len(_HEADER) - 1)))
                rows += [row.cells() for row in found]
                judged += [row.met for row in found if row.met is not None]
        return [
            *aligned(rows, _LEFT),
            "",
            f"aims: {judged.count(True)} met, {judged.count(False)} missed"
            if self.judged
            else "The model is tiny: all this shows is that everything ran.",
        ]

    def _rows(self, group: Group) -> list[Row]:
        rows = []
        for part in group.parts:
            figures = self.figures.get(part.key)
            if figures is not None and figures["status"] == "measured":
                rows.append(self._row(part, figures))
                rows += self._further(group, part, figures)
        return rows

    def _row(self, part: Part, figures: Figures) -> Row:
        seconds = figures["seconds"]
        ceilings = self.ceilings.get(part.shape.label)
        floor = part.floor(figures, ceilings) if ceilings else None
        share = floor / seconds if floor else None
        aim = part.aim if self.judged else None
        return Row(
            name=part.name,
            seconds=seconds,
            tokens_per_second=figures.get("tokens_per_second"),
            floor_seconds=floor,
            share=share,
            aim=_aim(aim),
            met=aim.met(1e6 * seconds, share) if aim else None,
        )

    def _further(self, group: Group, part: Part, figures: Figures) -> Iterator[Row]:
        """Yield further figures of a part."""
        if isinstance(part, Decode) and figures["host_seconds"] is not None:
            seconds = figures["host_seconds"]
            aim = part.host_aim if self.judged else None
            yield Row(
                name="  of it the host's work",
                seconds=seconds,
                aim=_aim(aim),
                met=aim.met(1e6 * seconds, None) if aim else None,
            )
        if isinstance(part, Offline) and group.session == "transformers":
            ours = self.figures.get(Offline(part.shape, part.workload, part.count, 0.0).key, {})
            if ours.get("status") == "measured":
                factor = ours["tokens_per_second"] / figures["tokens_per_second"]
                judged = self.judged and isinstance(part, ContinuousBatching)
                yield Row(
                    name=f"  the engine is {factor:.2f}x as fast",
                    aim=f">= {PEER_FACTOR:.0f}x" if judged else None,
                    met=factor >= PEER_FACTOR if judged else None,
                )


def _aim(aim: Aim | None) -> str | None:
    if aim is None:
        return None
    return f"<= {aim.micros / 1e3:g} ms" if aim.micros is not None else str(aim)


def _ceilings(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
