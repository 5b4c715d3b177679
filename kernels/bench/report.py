"""The report: text lines, and a JSON file with everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.bench.case import MODELS, Case
from kernels.bench.testing import Outcome

_HEADER = ("", "us", "rate", "share", "best of torch", "us", "ratio", "aim", "")
_SHOWN = 6  # failures shown per operation; the file has all
_LEFT = (0, 4, 7, 8)  # left-aligned columns, with text; numbers are right-aligned


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run.

    Attributes:
        machine: date, GPU, driver and versions.
        tests: outcome by operation.
        cases: every case with its figures, in the order of the table.
    """

    machine: dict[str, str | None]
    ceilings: dict[str, float | None]
    tests: dict[str, Outcome]
    cases: Sequence[tuple[Case, dict[str, Any]]]

    @property
    def faulty(self) -> bool:
        """Whether a test failed, or a case that should have been measured was not."""
        return any(found.failed for found in self.tests.values()) or any(
            figures["status"] in ("refused", "failed") or _disputed(figures)
            for _, figures in self.cases
        )

    def write_json(self, path: Path) -> None:
        """Write the whole report to `path`."""
        content = {
            "machine": self.machine,
            "ceilings": self.ceilings,
            "tests": {name: asdict(found) for name, found in self.tests.items()},
            "cases": [
                {
                    "operation": case.operation,
                    "name": case.name,
                    "shape": {name: str(value) for name, value in case.shape.items()},
                    "aim": str(case.aim) if case.aim else None,
                    **figures,
                    **self._judged(case, figures),
                }
                for case, figures in self.cases
            ],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def lines(self, profile: Sequence[str] = ()) -> list[str]:
        """Return the report as text, ending with the table.

        Args:
            profile: operations whose kernels' resources are listed even if no aim is missed.
        """
        return [
            *(f"{name}: {value}" for name, value in self.machine.items()),
            *self._test_lines(),
            *self._resource_lines(profile),
            *self._case_lines(),
        ]

    def _test_lines(self) -> list[str]:
        lines: list[tuple[str, ...]] = [("tests of", "passed", "failed", "skipped", "s")]
        for name, found in self.tests.items():
            counts = (found.passed, found.failed, found.skipped, round(found.seconds))
            lines.append((name, *map(str, counts)))
        failures = []
        for name, found in self.tests.items():
            shown = found.failures[:_SHOWN]
            failures += [f"FAILED {name}: {test}: {message}" for test, message in shown]
            if len(found.failures) > len(shown):
                failures.append(f"FAILED {name}: and {len(found.failures) - len(shown)} more")
        return ["", *aligned(lines, left=(0,)), *failures]

    def _resource_lines(self, profile: Sequence[str]) -> list[str]:
        lines: list[str] = []
        for case, figures in self.cases:
            missed = self._judged(case, figures).get("met") is False
            if not missed and case.operation not in profile:
                continue
            lines += [
                f"{case.key}: {kernel['kernel']}: {kernel['registers']} registers, "
                f"{kernel['spills']} spilled, {kernel['shared']} B shared, "
                f"{kernel['num_warps']} warps, {kernel['num_stages']} stages; "
                f"{kernel['resident_warps']} of {kernel['most_warps']} warps resident"
                for kernel in figures.get("kernels", [])
            ]
        return ["", "kernels:", *lines] if lines else []

    def _case_lines(self) -> list[str]:
        """Return the cases without figures and why, then the table, grouped by operation."""
        rows: list[tuple[str, ...]] = [_HEADER]
        others: list[str] = []
        operation = None
        for case, figures in self.cases:
            if figures["status"] == "measured":
                if case.operation != operation:
                    operation = case.operation
                    rows.append((operation, *[""] * (len(_HEADER) - 1)))
                rows.append(self._row(case, figures))
                others += [
                    f"{case.key}: {name}: {peer.get('differs') or peer.get('reason')}"
                    for name, peer in figures["peers"].items()
                    if "micros" not in peer
                ]
            else:
                others.append(f"{case.key}: {figures['status']}: {figures['reason']}")
        models = ", ".join(f"{model.label}: {model.name}" for model in MODELS)
        title = f"{models}; median times, each with a cold L2 cache"
        return ["", *others, "", title, *aligned(rows, _LEFT), *self._summary()]

    def _row(self, case: Case, figures: dict[str, Any]) -> tuple[str, ...]:
        judged = self._judged(case, figures)
        unit = "TF/s" if figures["flops"] else "GB/s"
        peer = judged["best_peer"]
        theirs = figures["peers"][peer]["micros"] if peer else None
        return (
            f"  {case.name}",
            _number(figures["micros"]),
            f"{judged['rate']:.0f} {unit}" if judged["rate"] else "",
            f"{judged['share']:.0%}" if judged["share"] is not None else "",
            peer or "",
            _number(theirs) if theirs else "",
            f"{theirs / figures['micros']:.2f}x" if theirs else "",
            str(case.aim or ""),
            "" if judged["met"] is None else "met" if judged["met"] else "MISSED",
        )

    def _judged(self, case: Case, figures: dict[str, Any]) -> dict[str, Any]:
        """Return what is derived from a case's figures: rate, share, best peer, aim met."""
        if figures["status"] != "measured":
            return {}
        micros, flops = figures["micros"], figures["flops"]
        rate = flops / micros / 1e6 if flops else figures["bytes"] / micros / 1e3
        ceiling = self.ceilings.get("bf16_tflop_s" if flops else "copy_gb_s")
        share = rate / ceiling if ceiling and rate else None
        times = {name: peer.get("micros") for name, peer in figures["peers"].items()}
        timed = {name: value for name, value in times.items() if value is not None}
        return {
            "rate": rate,
            "share": share,
            "best_peer": min(timed, key=lambda name: timed[name]) if timed else None,
            "met": case.aim.met(micros, share) if case.aim else None,
        }

    def _summary(self) -> list[str]:
        judged = [self._judged(case, figures).get("met") for case, figures in self.cases]
        count = {
            status: sum(figures["status"] == status for _, figures in self.cases)
            for status in ("measured", "refused", "failed", "skipped", "left out")
        }
        ceilings = ", ".join(
            f"{name} {value:.4g}" if value is not None else f"{name} unknown"
            for name, value in self.ceilings.items()
        )
        return [
            "",
            f"ceilings of this run: {ceilings}",
            f"aims: {judged.count(True)} met, {judged.count(False)} missed",
            "cases: " + ", ".join(f"{number} {status}" for status, number in count.items()),
            f"tests: {sum(found.passed for found in self.tests.values())} passed, "
            f"{sum(found.failed for found in self.tests.values())} failed, "
            f"{sum(found.skipped for found in self.tests.values())} skipped",
        ]


def _disputed(figures: dict[str, Any]) -> bool:
    return any("differs" in peer for peer in figures.get("peers", {}).values())


def _number(micros: float) -> str:
    return f"{micros:.1f}" if micros < 1000 else f"{micros:.0f}"


def aligned(rows: Sequence[tuple[str, ...]], left: Sequence[int]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
