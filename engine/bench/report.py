"""The report of a run: text that ends with the tables in Markdown, and a file with everything."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engine.bench import part_table
from engine.bench.part import Figures, TimedPart
from engine.bench.parts import Group
from kernels.bench import runner, table
from kernels.bench.case import Case
from kernels.bench.testing import Outcome

KINDS = ("decode", "mixed", "prefill")
_SHOWN = 6  # failures shown per suite; failures.txt has all


@dataclass(slots=True)
class Report:
    """The results of a run so far.

    Attributes:
        machine: date, GPU, driver, versions and command.
        groups: what is measured on the engine and on transformers.
        cases: what is measured of the kernels.
        folder: where its files are written.
        judged: whether the figures are compared with the aims.
        warnings: what a reader of the figures must know.
        tests: outcome by suite.
        measured: the ceilings, and the figures of replays, parts and cases by key.
    """

    machine: dict[str, str | None]
    groups: Sequence[Group]
    cases: Sequence[Case]
    folder: Path
    judged: bool = True
    warnings: list[str] = field(default_factory=list)
    tests: dict[str, Outcome] = field(default_factory=dict)
    measured: runner.Figures = field(default_factory=runner.Figures)

    @property
    def figures(self) -> dict[str, Figures]:
        """The figures of replays, parts and cases by key."""
        return self.measured.cases

    @property
    def faulty(self) -> bool:
        """Whether a test or a replay failed, or something that should be measured was not."""
        return any(found.failed for found in self.tests.values()) or any(
            figures["status"] in ("refused", "failed")
            or figures.get("unequal")
            or table.disputed(figures)
            for figures in self.figures.values()
        )

    def write(self) -> None:
        """Write everything so far; a reader finds the old or the new content of a file."""
        with self.measured.lock:
            self._write()

    def _write(self) -> None:
        content = {
            "machine": self.machine,
            "warnings": self.warnings,
            "tests": {
                name: {key: value for key, value in asdict(found).items() if key != "details"}
                for name, found in self.tests.items()
            },
            "ceilings": self.measured.ceilings,
            "replays": self._replays(),
            "figures": self.figures,
            "rows": [asdict(row) for row in self._part_rows()],
            "cases": {
                case.key: table.judged(case, self.figures[case.key], self.measured.ceilings)
                for case in self._measured_cases()
            },
        }
        _replace(self.folder / "results.json", json.dumps(content, indent=1) + "\n")
        _replace(self.folder / "report.md", "\n".join(self.lines()) + "\n")
        details = [
            f"{'=' * 20} {name}: {failure}\n{text}\n"
            for name, found in self.tests.items()
            for (failure, _), text in zip(found.failures, found.details, strict=True)
        ]
        _replace(self.folder / "failures.txt", "\n".join(details))

    def lines(self) -> list[str]:
        """Return the report as text."""
        return [
            *self._test_lines(),
            *self._replay_lines(),
            *self._missing(),
            *self._remarks(),
            *(f"WARNING: {warning}" for warning in self.warnings),
            "",
            *self._tables(),
        ]

    def _test_lines(self) -> Iterator[str]:
        for name, found in self.tests.items():
            yield f"tests of {name}: {found}, {found.seconds:.0f} s"
        for name, found in self.tests.items():
            for test, message in found.failures[:_SHOWN]:
                yield f"FAILED {name}: {test}: {message}"
            if len(found.failures) > _SHOWN:
                yield f"FAILED {name}: and {len(found.failures) - _SHOWN} more"

    def _replays(self) -> dict[str, int]:
        """Return the number of replayed steps, of those with different results, and by kind."""
        count: Counter[str] = Counter(replays=0, unequal=0)
        for each in self.figures.values():
            if "replays" in each:
                count.update(replays=each["replays"], unequal=len(each["unequal"]), **each["kinds"])
        return dict(count)

    def _replay_lines(self) -> Iterator[str]:
        count = self._replays()
        if count["replays"]:
            yield f"replays: {count['replays']:,}, of which {count['unequal']} gave other bits"
        for key, figures in self.figures.items():
            for line in figures.get("unequal", [])[:_SHOWN]:
                yield f"UNEQUAL {key}: {line}"

    def _missing(self) -> Iterator[str]:
        for key, figures in self.figures.items():
            if figures["status"] != "measured":
                yield f"{key}: {figures['status']}: {figures['reason']}"

    def _remarks(self) -> Iterator[str]:
        for case in self._measured_cases():
            yield from table.remarks(case, self.figures[case.key], self.measured.ceilings)

    def _tables(self) -> Iterator[str]:
        """Yield the tables, and where and how they were measured, for a README."""
        facts = [f"{name} {value}" for name, value in self.machine.items() if value is not None]
        yield ", ".join(facts) + "."
        ceilings = self.measured.ceilings.items()
        known = [f"{name} {value:.4g}" for name, value in ceilings if value is not None]
        tests = Outcome()
        for found in self.tests.values():
            tests.add(found)
        count = self._replays()
        yield f"Ceilings: {', '.join(known)}. Tests: {tests}."
        kinds = [f"{count[kind]:,} {kind}" for kind in KINDS if kind in count]
        kinds_text = f" ({', '.join(kinds)})" if kinds else ""
        unequal = count["unequal"]
        yield f"Steps replayed: {count['replays']:,}{kinds_text}, with other bits: {unequal}."
        parts = list(self._part_rows())
        cases = self._measured_cases()
        if parts:
            yield ""
            cells = [row.cells() for row in parts]
            yield from table.markdown([part_table.HEADER, *cells], part_table.TEXT)
        if cases:
            yield ""
            ceiling = self.measured.ceilings
            lines = [table.row(case, self.figures[case.key], ceiling) for case in cases]
            yield from table.markdown([table.HEADER, *lines], table.TEXT)
        yield ""
        if self.judged:
            met = [row.met for row in parts]
            met += [
                table.judged(case, self.figures[case.key], self.measured.ceilings)["met"]
                for case in cases
            ]
            yield f"Aims: {met.count(True)} met, {met.count(False)} missed."
        else:
            yield "The models are tiny: all this shows is that everything ran."

    def _part_rows(self) -> Iterator[part_table.Row]:
        for group in self.groups:
            for part in group.parts:
                if isinstance(part, TimedPart) and self._is_measured(part.key):
                    yield from part_table.rows(
                        part, self.figures, self.measured.ceilings, judged=self.judged
                    )

    def _measured_cases(self) -> list[Case]:
        return [case for case in self.cases if self._is_measured(case.key)]

    def _is_measured(self, key: str) -> bool:
        return self.figures.get(key, {}).get("status") == "measured"


def _replace(file: Path, text: str) -> None:
    written = file.with_suffix(".part")
    written.write_text(text)
    os.replace(written, file)
