"""`python -m engine.bench.host_time`: the host's CPU time per step, by part, on the null device.

Of `EngineCore.step`: schedule, plan and upload, read and update, outputs, statistics. Beside them:
adding new requests, and encoding the outputs, which the writer's thread does. With `--against`,
another checkout is measured in turns with this one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engine.bench.host_steps import CASES, PARTS, STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = (1, 16, 64, 256, 1024)
_OURS = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("host_steps.py")

# Case -> rows -> part -> seconds, of the round with the least: other programs only add to it.
Times = dict[str, dict[int, dict[str, float]]]


class Worker:
    """A context manager: the steps of one checkout, in a process of its own."""

    def __init__(self, checkout: Path, max_num_seqs: int) -> None:
        """Start it; the engine has room for `max_num_seqs` sequences."""
        self._checkout = checkout
        # -P: the folder of the file that it runs is no package root.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), f"--max-num-seqs={max_num_seqs}"],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: str, rows: int) -> dict[str, float]:
        """Return the seconds per step, by part.

        Raises:
            RuntimeError: the checkout cannot be measured, such as one without a null device.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # the missing answer is reported
            self._process.stdin.write(json.dumps({"case": case, "rows": rows}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._checkout} cannot be measured; see above")
        seconds: dict[str, float] = json.loads(line)
        return seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()  # nothing to save
        with suppress(BrokenPipeError):
            self._process.communicate()


def measure(checkouts: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Times]:
    """Measure all cases in each of `checkouts`, in turns.

    Raises:
        RuntimeError: a checkout cannot be measured.
    """
    found: list[Times] = [{case: {} for case in CASES} for _ in checkouts]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(each, max(rows))) for each in checkouts]
        for _, case, count in product(range(rounds), CASES, rows):
            for worker, times in zip(workers, found, strict=True):
                seconds = worker.measure(case, count)
                least = times[case].get(count)
                if least is None or step_seconds(seconds) < step_seconds(least):
                    times[case][count] = seconds
    return found


def step_seconds(parts: dict[str, float]) -> float:
    """Return the seconds of `EngineCore.step`."""
    return sum(parts[part] for part in STEP_PARTS)


def table(times: Times) -> list[str]:
    """Return the lines of the table, in milliseconds."""
    lines = [f"{'ms per step':<14}{'rows':>6}{'step':>9}" + "".join(f"{p:>14}" for p in PARTS)]
    for case in CASES:
        for rows, parts in times[case].items():
            cells = "".join(f"{1e3 * parts[part]:14.3f}" for part in PARTS)
            lines.append(f"{case:<14}{rows:>6}{1e3 * step_seconds(parts):9.3f}{cells}")
    return lines


def comparison(before: Times, after: Times) -> list[str]:
    """Return the lines of the table of both steps, in milliseconds."""
    lines = [f"{'ms per step':<14}{'rows':>6}{'against':>10}{'here':>10}{'ratio':>8}"]
    for case in CASES:
        for rows, parts in after[case].items():
            old, new = step_seconds(before[case][rows]), step_seconds(parts)
            lines.append(f"{case:<14}{rows:>6}{1e3 * old:10.3f}{1e3 * new:10.3f}{new / old:8.2f}")
    return lines


def draw(path: Path, by_name: dict[str, Times]) -> None:
    """Plot the time of a step against the rows to a PNG file, one panel per case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(2, 2, sharex=True, sharey=True).flat)
    for case, panel in zip(CASES, panels, strict=True):
        for name, times in by_name.items():
            rows = list(times[case])
            panel.plot(rows, [1e3 * step_seconds(times[case][n]) for n in rows], "o-", label=name)
        panel.set_title(case)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("rows")
        panel.set_ylabel("host ms per step")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the files that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.host_time", description=__doc__)
    parser.add_argument("--rows", type=_positive, nargs="+", default=_ROWS, help="rows of a step")
    parser.add_argument("--rounds", type=_positive, default=3, help="the fastest counts")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the growth to a PNG file")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: needs matplotlib; pip install 'trident-llm[bench]'")
    checkouts = {"here": _OURS}
    if options.against:
        if not (options.against / "engine").is_dir():
            parser.error(f"--against: {options.against} is no checkout")
        checkouts = {"against": options.against.resolve(), **checkouts}
    try:
        found = measure(list(checkouts.values()), sorted(options.rows), options.rounds)
    except RuntimeError as error:
        parser.error(str(error))
    by_name = dict(zip(checkouts, found, strict=True))
    for name, times in by_name.items():
        print("\n".join(["", f"{name}: {checkouts[name]}", *table(times)]))
    if options.against:
        print("\n".join(["", *comparison(by_name["against"], by_name["here"])]))
    if options.json:
        options.json.write_text(json.dumps(by_name, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(options.plot, by_name)


if __name__ == "__main__":
    main()
