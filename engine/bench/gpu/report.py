"""The report of a run: text with the table in Markdown, and a file with everything."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch.utils import collect_env

from engine.bench.gpu.part import Figures
from engine.bench.tables import markdown
from engine.config.engine_config import EngineConfig

HEADER = ("", "ms", "rate", "floor ms", "share", "torch", "ms", "ratio", "aim", "")


class Report:
    """The results of a run so far.

    Args:
        folder: where its files are written.
        judged: whether the figures are compared with the aims.

    Attributes:
        tests: pytest's last line of each file, and its failures.
        ceilings: of this machine.
        figures: of each part by its key, or the `reason` for none.
    """

    def __init__(self, folder: Path, *, judged: bool) -> None:
        self._folder, self._judged, self._machine = folder, judged, _machine()
        self.tests: dict[str, list[str]] = {}
        self.ceilings: dict[str, float] = {}
        self.figures: dict[str, Figures] = {}

    @property
    def faulty(self) -> bool:
        """Whether a test failed, or something that should be measured was not, or is wrong."""
        return any(is_fault for _, is_fault in self._told())

    def write(self) -> str:
        """Write everything so far; return the report, which ends with the table for a README."""
        content = {
            "machine": self._machine,
            "tests": self.tests,
            "ceilings": self.ceilings,
            "figures": self.figures,
        }
        (self._folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
        limits = (f"{k} {v:.4g}" for k, v in self.ceilings.items())
        text = "\n".join(
            (
                *(line for line, _ in sorted(self._told(), key=lambda told: not told[1])),
                "",
                ", ".join(f"{k} {v}" for k, v in self._machine.items() if v) + ".",
                f"Ceilings, in bytes and operations per second: {', '.join(limits)}.",
                *(f"{name}: {last}" for name, (last, *_) in self.tests.items()),
                "",
                self._table(),
            )
        )
        (self._folder / "report.md").write_text(text + "\n")
        return text

    def _told(self) -> Iterator[tuple[str, bool]]:
        """Yield what went otherwise than planned, and whether it is a fault."""
        for _, *failures in self.tests.values():
            yield from ((line, True) for line in failures)
        for key, each in self.figures.items():
            for why in ("reason", "left_out"):
                if why in each:
                    yield f"{key}: {each[why]}", why == "reason"
            for name, peer in each.get("peers", {}).items():
                if "differs" in peer:
                    yield f"{key}: {name} differs: {peer['differs']}", True
                elif "reason" in peer:
                    yield f"{key}: {name}: {peer['reason']}", False

    def _table(self) -> str:
        found = [each for each in self.figures.values() if "seconds" in each]
        rows = [_row(each)[: None if self._judged else -2] for each in found]
        met = Counter(each.get("met") for each in found)
        last = f"Aims: {met[True]} met, {met[False]} missed."
        if not self._judged:
            last = "The models are tiny: all this shows is that everything ran."
        return f"{markdown(HEADER, rows)}\n\n{last}"


def _row(figures: Figures) -> tuple[str, ...]:
    """Return the cells of a measured part, for `HEADER`."""
    seconds, floor = figures["seconds"], figures["floor"]
    peers = {
        k: peer["seconds"] for k, peer in figures.get("peers", {}).items() if "seconds" in peer
    }
    best = min(peers, key=lambda name: peers[name], default="")
    met = figures.get("met")
    return (
        figures["key"],
        _milliseconds(seconds),
        _rate(figures),
        _milliseconds(floor),
        "" if not floor else f"{floor / seconds:.0%}",
        best,
        _milliseconds(peers.get(best)),
        f"{peers[best] / seconds:.2f}x" if best else "",
        figures.get("aim", ""),
        "" if met is None else "met" if met else "MISSED",
    )


def _rate(figures: Figures) -> str:
    if tokens := figures.get("tokens_per_second"):
        return f"{tokens:,.0f} tok/s"
    if flops := figures.get("flops"):
        return f"{flops / figures['seconds'] / 1e12:.0f} TF/s"
    return f"{figures['bytes'] / figures['seconds'] / 1e9:.0f} GB/s" if "bytes" in figures else ""


def _milliseconds(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f"{1e3 * seconds:,.2f}" if seconds >= 1e-3 else f"{1e3 * seconds:.4f}"


def _machine() -> dict[str, str | None]:
    """Return date, GPU, versions, the command, and settings of TRIDENT_* variables."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python -m engine.bench", *sys.argv[1:]]),
        "settings": str(EngineConfig.overrides(os.environ) or "") or None,
    }
