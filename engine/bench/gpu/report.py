"""The report of a run: text with the table in Markdown, and a file with everything."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import triton

from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.tables import markdown
from engine.config import EngineConfig

HEADER = ("", "ms", "rate", "floor ms", "share", "torch", "ms", "ratio", "aim", "")


class Report:
    """The results of a run so far; several threads may add to them.

    Args:
        groups: what is measured, in the order of the table.
        folder: where its files are written, after each change.
        judged: whether the figures are compared with the aims.

    Attributes:
        tests: figures by the id of a test.
        figures: by the key of a part.
    """

    def __init__(self, groups: Sequence[Group], folder: Path, *, judged: bool) -> None:
        self._parts = [part for group in groups for part in group.parts]
        self._folder, self._judged, self._lock = folder, judged, threading.Lock()
        self._machine, self._written = _machine(), 0.0
        self.tests: dict[str, Figures] = {}
        self.figures: dict[str, Figures] = {}

    def add(self, keys: Sequence[str], figures: Figures) -> None:
        """Set the figures of these parts."""
        with self._lock:
            self.figures |= dict.fromkeys(keys, figures)
            self.write()

    def add_test(self, test: str, figures: Figures) -> None:
        """Set the outcome of a test; once it has failed, it has."""
        with self._lock:
            if self.tests.get(test, {}).get("status") != "failed":
                self.tests[test] = figures
            if time.monotonic() > self._written + 1.0:
                self.write()

    def refusal(self, group: Group, key: str) -> str | None:
        """Return why a part must not be measured, None if no test says so.

        Of the tests that are about it, one must have passed and none failed, if any were run.
        """
        about = {
            test: each["status"] for test, each in self.tests.items() if group.refused_by(key, test)
        }
        failed = [test for test, status in about.items() if status == "failed"]
        if failed:
            return f"{failed[0]} failed"
        return "no test of it has passed" if about and "passed" not in about.values() else None

    @property
    def outcome(self) -> str:
        """The number of tests by status, as text."""
        return _counts(Counter(each["status"] for each in self.tests.values()))

    @property
    def faulty(self) -> bool:
        """Whether a test or a replay failed, or something that should be measured was not."""
        return any(each["status"] == "failed" for each in self.tests.values()) or any(
            each["status"] in ("refused", "failed")
            or each.get("unequal")
            or any("differs" in peer for peer in each.get("peers", {}).values())
            for each in self.figures.values()
        )

    def write(self) -> None:
        """Write everything so far; a reader finds the old or the new content of a file."""
        self._written = time.monotonic()
        content = {
            "machine": self._machine,
            "tests": self.tests,
            "replays": self._replays(),
            "figures": self.figures,
        }
        details = [
            f"{'=' * 20} {test}\n{each.get('details', each['reason'])}\n"
            for test, each in self.tests.items()
            if each["status"] == "failed"
        ]
        for name, text in (
            ("results.json", json.dumps(content, indent=1)),
            ("report.md", self.text()),
            ("failures.txt", "\n".join(details)),
        ):
            part = self._folder / f"{name}.part"
            part.write_text(text + "\n")
            os.replace(part, self._folder / name)

    def text(self) -> str:
        """Return the report as text, which ends with the table for a README."""
        return "\n".join([*self._remarks(), "", *self._facts(), "", self._table()])

    def _remarks(self) -> Iterator[str]:
        for test, each in self.tests.items():
            if each["status"] == "failed":
                yield f"FAILED {test}: {each['reason']}"
        for key, each in self.figures.items():
            if each["status"] != "measured":
                yield f"{key}: {each['status']}: {each['reason']}"
            yield from (f"UNEQUAL {key}: {line}" for line in each.get("unequal", ()))
            yield from (f"{key}: {remark}" for remark in each.get("remarks", ()))
            for name, peer in each.get("peers", {}).items():
                if why := peer.get("differs") or peer.get("reason"):
                    yield f"{key}: {name}: {why}"
        for part in self._measured():
            if _row(part, self.figures)[-1] == "MISSED" and self._judged:
                kernels = self.figures[part.key].get("kernels", ())
                yield from (f"{part.key}: {line}" for line in kernels)

    def _facts(self) -> Iterator[str]:
        yield ", ".join(f"{name} {value}" for name, value in self._machine.items() if value) + "."
        limits = _ceilings(self.figures)
        if limits:
            known = [f"{name} {value:.4g}" for name, value in limits.items()]
            yield f"Ceilings, in bytes and operations per second: {', '.join(known)}."
        yield f"Tests: {self.outcome}."
        replays = self._replays()
        unequal = replays.pop("unequal")
        yield f"Steps replayed: {_counts(replays)}; with other bits: {unequal}."

    def _table(self) -> str:
        rows = [_row(part, self.figures) for part in self._measured()]
        if not self._judged:
            rows = [(*row[:-2], "", "") for row in rows]
            last = "The models are tiny: all this shows is that everything ran."
        else:
            met = Counter(row[-1] for row in rows)
            last = f"Aims: {met['met']} met, {met['MISSED']} missed."
        return f"{markdown(HEADER, rows)}\n\n{last}"

    def _measured(self) -> Iterator[Part]:
        """Yield the parts of the table: those with figures to hold against something."""
        for part in self._parts:
            figures = self.figures.get(part.key, {})
            is_row = "seconds" in figures and "replays" not in figures
            if is_row and figures["status"] == "measured":
                yield part

    def _replays(self) -> Counter[str]:
        """Return the number of replayed steps by kind, and of those with different results."""
        count: Counter[str] = Counter(unequal=0)
        for each in self.figures.values():
            count.update(each.get("kinds", {}))
            count["unequal"] += len(each.get("unequal", ()))
        return count


def _row(part: Part, by_key: Mapping[str, Figures]) -> tuple[str, ...]:
    """Return the cells of a measured part, for `HEADER`."""
    figures, limits = by_key[part.key], _ceilings(by_key)
    seconds = figures["seconds"]
    floor = part.floor(figures, limits) if part.floor and limits else None
    share = floor / seconds if floor else None
    peers = {
        name: peer["seconds"]
        for name, peer in figures.get("peers", {}).items()
        if "seconds" in peer
    }
    beside = by_key.get(part.beside or "", {})
    if beside.get("status") == "measured":
        peers["transformers"] = beside["seconds"]
    best = min(peers, key=lambda name: peers[name], default="")
    factor = peers[best] / seconds if best else None
    met = part.aim.met(seconds, share, factor) if part.aim else None
    if part.aim and part.aim.factor and factor is None:
        met = None  # there is nothing to compare with yet
    return (
        part.key,
        _milliseconds(seconds),
        _rate(figures),
        _milliseconds(floor),
        "" if share is None else f"{share:.0%}",
        best,
        _milliseconds(peers.get(best)),
        "" if factor is None else f"{factor:.2f}x",
        str(part.aim or ""),
        "" if met is None else "met" if met else "MISSED",
    )


def _rate(figures: Figures) -> str:
    if tokens := figures.get("tokens_per_second"):
        return f"{tokens:,.0f} tok/s"
    if flops := figures.get("flops"):
        return f"{flops / figures['seconds'] / 1e12:.0f} TF/s"
    return f"{figures['bytes'] / figures['seconds'] / 1e9:.0f} GB/s" if "bytes" in figures else ""


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:,.2f}" if seconds >= 1e-3 else f"{1e3 * seconds:.4f}"


def _ceilings(by_key: Mapping[str, Figures]) -> dict[str, float]:
    found = by_key.get("ceilings", {})
    return {name: value for name, value in found.items() if name != "status" and "read" in found}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _machine() -> dict[str, str | None]:
    """Return date, GPU, versions, the command, and settings of TRIDENT_* variables."""
    driver = None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        driver = subprocess.check_output(query, text=True, timeout=20).split("\n")[0].strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "command": " ".join(["python -m engine.bench", *sys.argv[1:]]),
        "settings": str(EngineConfig.overrides(os.environ) or "") or None,
    }
