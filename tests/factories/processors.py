"""Logits processors for tests, in this process or in an installed package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.logits_processors import Adjustment, ProcessorContext, ProcessorRow


class Counting:
    """Prefers the token `first`, then the one after it, and so on: `dense` or by a few values.

    `fail` names a fault, which comes with output token `at`.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size
        self.calls: list[int] = []  # rows of each

    def validate(self, args: Mapping[str, Any]) -> None:
        unknown = sorted({*args} - {"first", "dense", "fail", "at"})
        if unknown:
            raise ValueError(f"{unknown[0]}: unknown argument")
        first = args.get("first")
        if not isinstance(first, int) or not 0 <= first < self.vocab_size:
            raise ValueError(f"first: must be 0 to {self.vocab_size - 1} (got {first!r})")
        if args.get("fail") == "validation":
            raise KeyError("no such key")

    def adjust(self, rows: Sequence[ProcessorRow]) -> Sequence[Adjustment]:
        self.calls.append(len(rows))
        answers = [self._adjust(row) for row in rows]
        if any(self._fails(row) == "count" for row in rows):
            answers.append(None)
        return answers

    def _fails(self, row: ProcessorRow) -> str | None:
        due = len(row.output_token_ids) == row.args.get("at", 0)
        return row.args.get("fail") if due else None

    def _adjust(self, row: ProcessorRow) -> Adjustment:
        match self._fails(row):
            case "raise":
                raise RuntimeError("the processor is broken")
            case "nan":
                return [3], [float("nan")]
            case "infinity":
                return [3], [float("inf")]
            case "outside":
                return [self.vocab_size], [1.0]
            case "lengths":
                return [3, 4], [1.0]
            case "floats":
                return [3.0], [1.0]
            case "shape":
                return np.zeros(self.vocab_size - 1)
            case "dense nan":
                return np.full(self.vocab_size, np.nan)
            case "nothing left":
                return np.full(self.vocab_size, -np.inf)
            case "text":
                return np.array(["x"] * self.vocab_size)
            case "write":
                row.token_ids[0] = 0
        row.state = (row.state or 0) + 1
        token = (row.args["first"] + len(row.output_token_ids)) % self.vocab_size
        if row.args.get("dense"):
            return np.where(np.arange(self.vocab_size) == token, 0.0, -np.inf)
        return [token], [1000.0]


def install(folder: Path, entry_points: Mapping[str, str]) -> Path:
    """Write to `folder` what pip leaves of a package with logits processors; return it."""
    info = folder / "trident_processors-1.2.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: trident-processors\nVersion: 1.2\n"
    )
    lines = [f"{name} = {target}\n" for name, target in entry_points.items()]
    info.joinpath("entry_points.txt").write_text("".join(["[trident.logits_processors]\n", *lines]))
    return folder
