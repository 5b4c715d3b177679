"""Run: the parts of one run in turn, each with a time limit, and their results as they come."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from engine.bench import gpu_tests
from engine.bench.parts import Group
from engine.bench.report import Report
from engine.bench.worker import plan, plan_replays
from engine.config import EngineConfig
from kernels.bench import runner, testing
from kernels.bench.machine import machine
from kernels.bench.operations import OPERATIONS, all_cases, tiny_cases
from kernels.bench.testing import Outcome

_OFFLINE = ("env", "HF_HUB_OFFLINE=1")  # transformers must not look for kernels on the hub
_SILENCE_S = 150.0  # more than a model takes to load and warm up
_LEAST_S = 5.0  # no part begins if less is left


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the run.

    Attributes:
        kind: its name in `--only`.
        share: of the time that is left when it begins; the rest is for the parts after it.
        work: does it until a deadline, by time.time().
        leave_out: reports that no time was left for it.
    """

    kind: str
    name: str
    share: float
    work: Callable[[float], None]
    leave_out: Callable[[], None] = lambda: None


class Run:
    """One run of the command, with the parsed `options` of its command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started = time.time()
        self._end = self._started + 60 * options.minutes
        options.out.mkdir(parents=True, exist_ok=True)
        self._progress: Path = options.out / "progress.txt"
        self._progress.write_text("")
        self._groups = plan(options.models, tiny=options.tiny)
        self._replays = plan_replays(options.replays, tiny=options.tiny)
        self.report = Report(
            self._machine(),
            self._groups,
            tiny_cases() if options.tiny else all_cases(),
            options.out,
            judged=not options.tiny,
        )
        self.report.measured.changed = self.report.write

    def say(self, text: str) -> None:
        """Print a line of progress with the time, and append it to progress.txt."""
        line = f"[{time.time() - self._started:5.1f} s] {text}"
        print(line, flush=True)
        with self._progress.open("a") as file:
            file.write(line + "\n")

    def all(self) -> int:
        """Run all parts; return 0, or 1 if something failed."""
        if "tests" not in self._options.only:
            self.report.warnings.append("the tests were left out of this run")
        for part in self._parts():
            if part.kind not in self._options.only:
                continue
            left = self._end - time.time()
            if left < _LEAST_S:
                self.say(f"{part.name}: no time was left")
                part.leave_out()
                continue
            seconds = part.share * left
            self.say(f"{part.name}, for {seconds:.0f} s at most:")
            part.work(time.time() + seconds)
            self.report.write()
        self.report.write()
        print("\n".join(self.report.lines()))
        return int(self.report.faulty)

    def _parts(self) -> list[_Part]:
        """Return the parts in order: what matters more comes first."""
        engine = [group for group in self._groups if group.session == "engine"]
        peers = [group for group in self._groups if group.session == "transformers"]
        first, last = engine[:2], engine[2:]
        parts = [
            _Part("tests", "tests", 0.38, self._test),
            _Part("replays", "replays", 0.25, self._replay),
            *(self._group_part(group, 0.5) for group in first),
            _Part("kernels", "kernels", 0.5, self._measure_kernels),
        ]
        return parts + [self._group_part(group, 0.5) for group in (*peers[:2], *last, *peers[2:])]

    def _group_part(self, group: Group, share: float) -> _Part:
        keys = [part.key for part in group.parts]
        return _Part(
            kind=group.session,
            name=group.name,
            share=share,
            work=partial(self._measure_group, group),
            leave_out=partial(runner.leave_out, keys, self.report.measured),
        )

    def _test(self, deadline: float) -> None:
        tiny = self._options.tiny
        suites = gpu_tests.suites(tiny=tiny)
        if not tiny:
            suites += testing.kernel_suites(OPERATIONS)
        self.report.tests = {suite.name: Outcome() for suite in suites}

        def changed(outcomes: dict[str, Outcome]) -> None:
            self.report.tests = outcomes
            self.report.write()

        with nullcontext() if tiny else runner.compiling(self._kernels_ahead(), deadline):
            testing.run(suites, deadline, say=self.say, changed=changed)

    def _kernels_ahead(self) -> list[tuple[list[str], list[str]]]:
        """Return the commands that compile the kernels of later parts, for `compiling`."""
        only = self._options.only
        found: list[tuple[list[str], list[str]]] = []
        groups = [group for group in self._groups if group.session == "engine"]
        by_model = {group.shape.label: group for group in self._replays}
        groups = [*by_model.values(), *groups]
        found += [(self._worker(group), []) for group in groups if group.session in only]
        if "kernels" in only:
            for operation in OPERATIONS:
                found.append((list(runner.WORKER), [case.key for case in operation.cases()]))
        return found

    def _replay(self, deadline: float) -> None:
        """Replay steps in several processes, which share the GPU."""
        with ThreadPoolExecutor(len(self._replays)) as pool:
            work = partial(self._measure, deadline=deadline)
            for _ in pool.map(work, self._replays):
                pass

    def _measure_group(self, group: Group, deadline: float) -> None:
        refused = None
        if group.session == "engine":
            refused = gpu_tests.refusal(self.report.tests, group.shape.family_name)
        keys = [part.key for part in group.parts]
        if refused and not self._options.anyway:
            self.report.measured.add(keys, {"status": "refused", "reason": refused})
            return
        if refused:
            self.report.warnings.append(f"{group.name}: {refused}: it may compute something else")
        self._measure(group, deadline)

    def _measure(self, group: Group, deadline: float) -> None:
        runner.measure(
            [part.key for part in group.parts],
            deadline,
            self.report.measured,
            say=self.say,
            command=self._worker(group),
            silence=_SILENCE_S,
        )

    def _worker(self, group: Group) -> list[str]:
        # The processes of replays share the cores, and their models are tiny.
        threads = ["OMP_NUM_THREADS=1"] if group.session == "replays" else []
        command = [*_OFFLINE, *threads, sys.executable, "-m", "engine.bench.worker", group.name]
        command += ["--replays", str(self._options.replays)]
        return [*command, "--tiny"] if self._options.tiny else command

    def _measure_kernels(self, deadline: float) -> None:
        keys = [case.key for case in self.report.cases]
        tests = self.report.tests
        if tests and not self._options.tiny and not self._options.anyway:
            for operation in OPERATIONS:
                if reason := testing.refusals(operation, tests):
                    refused = [case.key for case in operation.cases()]
                    self.report.measured.add(refused, {"status": "refused", "reason": reason})
        command = [*runner.WORKER, "--tiny"] if self._options.tiny else runner.WORKER
        left = self.report.measured.without(keys)
        runner.measure(left, deadline, self.report.measured, say=self.say, command=command)

    def _machine(self) -> dict[str, str | None]:
        settings = EngineConfig.overrides(os.environ)
        return {
            **machine(),
            "transformers": version("transformers"),
            "command": " ".join(["python -m engine.bench", *sys.argv[1:]]),
            "settings": str(settings) if settings else None,
            "device": None if torch.cuda.is_available() else "cpu",
        }
