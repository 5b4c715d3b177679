"""`python -m engine.bench.host_steps`: the host's CPU time per step, by part, on the null device.

Of `EngineCore.step`: schedule, plan and upload, read and update, outputs, statistics. Beside them:
adding new requests, and encoding the outputs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.execution import null_device, pending_step
from engine.service.garbage import spare_startup_objects
from engine.service.process.inbox import Inbox
from engine.service.process.loop import EngineLoop

# What takes the time: in `EngineCore.step`, then around it.
STEP_PARTS = ("schedule", "plan, upload", "read, update", "outputs", "stats", "other")
PARTS = (*STEP_PARTS, "add", "send")

# The load: decoding rows alone; with two stop strings; with 5 log-probabilities; and with requests
# that end and are followed by new ones.
CASES = ("decode", "stop strings", "logprobs", "arrivals")

_ROUNDS = 3
_WARM_UP_STEPS = 20
_MOST_STEPS, _LEAST_STEPS = 200, 40
_ROWS_MEASURED = 50_000  # steps times rows, which takes a second or less
_TOKENS = 128  # of each prompt and each answer, where requests arrive
_ENDLESS = 1900  # tokens of an answer, more than the steps
_PARAMS: dict[str, dict[str, Any]] = {
    "stop strings": {"stop": ["\n\nQuestion:", "END OF TEXT"]},
    "logprobs": {"logprobs": 5},
}


Times = dict[str, dict[str, float]]  # seconds, by case and part


class PartClock:
    """Sums this thread's CPU seconds by part; the time of a part inside another is its own."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]  # seconds of the parts inside each of those that run now

    def wrap(self, part: str, owner: Any, *names: str) -> None:
        """Count the calls of these methods of `owner`, an object or a class, as `part`."""
        for name in names:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed


class HostSteps(Steps):
    """The engine and its loop on the null device, with the parts of a step timed."""

    def __init__(self, max_num_seqs: int) -> None:
        """Serve up to `max_num_seqs` sequences at once."""
        super().__init__(
            {
                "device": "null",
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max(8192, max_num_seqs),
                "max_num_queued_reqs": 2**31,
                "max_num_queued_tokens": 2**31,
            }
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._loop = EngineLoop(self.core, Inbox(lambda request: None), self._send)
        self._clock = clock = PartClock()
        self._random = random.Random(0)
        core = self.core
        clock.wrap("schedule", core.scheduler, "schedule")
        clock.wrap("plan, upload", core._runner, "forward", "sample")
        clock.wrap("read, update", pending_step.PendingStep, "wait")
        clock.wrap("read, update", core.scheduler, "update")
        clock.wrap("stats", core._recorder, "stepped", "finished")
        clock.wrap("outputs", core, "_outputs_of", "_hand_out")
        clock.wrap("other", core, "step")
        # What the device would do, in no time of the host's.
        clock.wrap("device", null_device.NullRunner, "_tokens", "_logprobs")
        clock.wrap("device", null_device, "scatter_tokens")
        clock.wrap("add", core, "add_request")
        clock.wrap("send", self._loop, "_step")  # what is left: encoding, and the loop itself

    def measure(self, case: str, rows: int) -> dict[str, float]:
        """Return the CPU seconds per step, by part."""
        steps = min(_MOST_STEPS, max(_LEAST_STEPS, _ROWS_MEASURED // rows))
        for number in range(rows):
            self._add(case, number + 1, rows)
        for _ in range(_WARM_UP_STEPS):
            self._step(case, rows)
        self._clock.seconds.clear()
        for _ in range(steps):
            self._step(case, rows)
        seconds = {part: self._clock.seconds[part] / steps for part in PARTS}
        self.clear()
        return seconds

    def _step(self, case: str, rows: int) -> None:
        self._loop._step()
        for _ in range(rows - len(self.core.scheduler.unfinished)):
            self._add(case, rows, rows)

    def _add(self, case: str, number: int, rows: int) -> None:
        """Add a request: the first ones end, or cross the border of a block, in turns."""
        length, max_tokens = 1 + number % 16, _ENDLESS
        if case == "arrivals":
            length, max_tokens = _TOKENS, -(-_TOKENS * number // rows)
        prompt = self._random.choices(range(100, 1000), k=length)
        params = {"max_tokens": max_tokens, "ignore_eos": True, **_PARAMS.get(case, {})}
        self.ask(prompt, **params)

    def _send(self, message: Any) -> None:
        to_message = getattr(message, "message", None)  # of the outputs of a step, as arrays
        self._encode(message if to_message is None else to_message())


def measure(rows: Sequence[int]) -> Times:
    """Return the fastest step of several rounds."""
    steps = HostSteps(max(rows))
    spare_startup_objects()  # as the engine process does
    return {
        f"{case}, {count}": min(
            (steps.measure(case, count) for _ in range(_ROUNDS)), key=step_seconds
        )
        for case in CASES
        for count in rows
    }


def step_seconds(parts: dict[str, float]) -> float:
    """Return the seconds of `EngineCore.step`."""
    return sum(parts[part] for part in STEP_PARTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the milliseconds of a step and of its parts."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.host_steps", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16, 64, 256, 1024))
    rows = []
    for case, parts in measure(parser.parse_args(arguments).rows).items():
        times = (step_seconds(parts), *(parts[part] for part in PARTS))
        rows.append([case, *(f"{1e3 * each:.3f}" for each in times)])
    print(markdown(["ms per step", "step", *PARTS], rows))


if __name__ == "__main__":
    main()
