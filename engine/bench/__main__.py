"""`python -m engine.bench`: test the engine on this machine's GPU, then measure it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from engine.bench.requirements import problem
from engine.bench.shapes import SHAPES

_ABOUT = (
    "Test the engine on this machine's GPU, then measure it. The engine has the settings of "
    "TRIDENT_* variables, such as TRIDENT_ENFORCE_EAGER=true, except those that a part sets."
)
_TEST_SHARE = 0.35  # maximum share of the time; the rest is for measuring
_OFFLINE = ("env", "HF_HUB_OFFLINE=1")  # transformers must not look for kernels on the hub
_SILENCE_S = 150.0  # more than a model takes to load and warm up
_LEAST_S = 40.0  # minimum to measure anything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 0, or 1 if a test or a part failed, or 2 if a requirement is missing."""
    options = _options(arguments)
    if missing := problem():
        print(missing)
        return 2
    import torch

    if not torch.cuda.is_available() and not options.tiny:
        print("no CUDA device: --tiny shows that everything works without one, and no figures")
        return 2
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    # Imported here, after checking that the packages exist.
    import torch

    from engine.bench import gpu_tests
    from engine.bench.report import Report
    from engine.bench.worker import plan
    from engine.config import EngineConfig
    from kernels.bench import runner
    from kernels.bench.machine import machine

    started = time.time()
    end = started + 60 * options.minutes

    def say(text: str) -> None:
        print(f"[{time.time() - started:5.1f} s] {text}", flush=True)

    where = {
        **machine(),
        "transformers": version("transformers"),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "settings": str(EngineConfig.overrides(os.environ)),
    }
    report = Report(where, plan(options.models, tiny=options.tiny), judged=not options.tiny)
    report.tests = gpu_tests.run(started + _TEST_SHARE * 60 * options.minutes, say)
    refused = gpu_tests.refusal(report.tests)
    if options.anyway and refused:
        report.warning = f"{refused}: the engine may compute something else"
    for group in report.groups:
        keys = [part.key for part in group.parts]
        if refused and group.session == "engine" and not options.anyway:
            report.figures |= {key: {"status": "refused", "reason": refused} for key in keys}
            continue
        if end - time.time() < _LEAST_S:
            late = {"status": "left out", "reason": "no time was left"}
            report.figures |= dict.fromkeys(keys, late)
            continue
        say(f"{group.name}:")
        found = runner.measure(
            keys,
            end,
            say=say,
            command=(
                *_OFFLINE,
                *(sys.executable, "-m", "engine.bench.worker", group.name),
                *(["--tiny"] if options.tiny else []),
            ),
            silence=_SILENCE_S,
        )
        report.figures |= found.cases
        if found.ceilings:
            report.ceilings[group.shape.label] = found.ceilings
        if options.json:  # now: the next group may not end in time
            report.write_json(options.json)
    if options.json:
        report.write_json(options.json)
    print("\n".join(report.lines()))
    return int(report.faulty)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=_ABOUT)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit of the whole run (default: 9)"
    )
    labels = [shape.label for shape in SHAPES]
    parser.add_argument(
        "--models", nargs="+", choices=labels, default=labels, help="default: all, in this order"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="check that everything works, on a tiny model; also on a CPU",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="measure the engine even if its tests fail"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
