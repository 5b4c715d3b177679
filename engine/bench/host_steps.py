"""`python -m engine.bench.host_steps`: the host's CPU time per step, by part, on the null device.

Of `EngineCore.step`: schedule, masks, plan and upload, read and update, outputs, statistics. Beside
them: adding new requests, and encoding the outputs, which the writer's thread does. With
`--grammars`, what structured output costs with a checkpoint's vocabulary: no weights are read.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.demo.tool_sets import ToolSets, calls_schema, calls_tag
from engine.execution import null_device, pending_step
from engine.service.garbage import spare_startup_objects
from engine.service.process.inbox import Inbox
from engine.service.process.loop import EngineLoop

# What takes the time: in `EngineCore.step`, then around it.
STEP_PARTS = ("schedule", "masks", "plan, upload", "read, update", "outputs", "stats", "other")
PARTS = (*STEP_PARTS, "add", "send")

# What is asked for, by case: decoding rows alone; with two stop strings; with 5 log-probabilities;
# and requests that end and are followed by new ones.
_ARRIVALS = "arrivals"
CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "stop strings": {"stop": ["\n\nQuestion:", "END OF TEXT"]},
    "logprobs": {"logprobs": 5},
    _ARRIVALS: {},
}
_JSON = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,9}) ("." [0-9]{1,9})?
"""
_TOOLS_SIZE = 100_000

_ROUNDS = 3
_WARM_UP_STEPS = 20
_MOST_STEPS, _LEAST_STEPS = 200, 40
_ROWS_MEASURED = 50_000  # steps times rows, which takes a second or less
_TOKENS = 128  # of each prompt and each answer, where requests arrive
_ENDLESS = 1900  # tokens of an answer, more than the steps

Times = dict[str, dict[str, float]]  # seconds, by case and part


def grammars() -> dict[str, dict[str, Any]]:
    """Return as `CASES` what the grammars describe, one document after the other."""
    tools = ToolSets(0).tools(_TOOLS_SIZE)
    found: dict[str, dict[str, Any]] = {
        "any object": {"json": {"type": "object"}},
        "a tool's schema": {"json": tools[0]["function"]["parameters"]},
        "100 KB of tools, schema": {"json": calls_schema(tools)},
        "100 KB of tools, tags": {"structural_tag": calls_tag(tools)},
        "regex": {"regex": r"[A-Z][a-z]{1,20}( [A-Za-z0-9]{1,20}){5,40}\."},
        "EBNF of JSON": {"grammar": _JSON},
    }
    drawn = {"temperature": 1.0, "max_tokens": 256, "ignore_eos": False}
    return {name: {"structured_outputs": asked, **drawn} for name, asked in found.items()}


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

    def __init__(self, max_num_seqs: int, model: str = "demo", *, is_ahead: bool = True) -> None:
        """Serve up to `max_num_seqs` sequences at once, with the vocabulary of `model`.

        One step ahead, sequences with grammars would take part in every other step.
        """
        super().__init__(
            {
                "model": model,
                "async_scheduling": is_ahead,
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
        clock.wrap("masks", core.scheduler.constraints, "batch")
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

    def measure(self, case: str, params: Mapping[str, Any], rows: int) -> dict[str, float]:
        """Return the CPU seconds per step, by part."""
        steps = min(_MOST_STEPS, max(_LEAST_STEPS, _ROWS_MEASURED // rows))
        for place in range(rows):
            self._add(case, params, place + 1, rows)
        while len(self.core.scheduler.running) < rows:  # a grammar is being compiled
            self._loop._step()
        for _ in range(_WARM_UP_STEPS):
            self._step(case, params, rows)
        self._clock.seconds.clear()
        for _ in range(steps):
            self._step(case, params, rows)
        seconds = {part: self._clock.seconds[part] / steps for part in PARTS}
        self.clear()
        return seconds

    def _step(self, case: str, params: Mapping[str, Any], rows: int) -> None:
        self._loop._step()
        for _ in range(rows - len(self.core.scheduler.unfinished)):
            self._add(case, params, rows, rows)

    def _add(self, case: str, params: Mapping[str, Any], place: int, rows: int) -> None:
        """Add a request: the first ones end, or cross the border of a block, in turns."""
        length, max_tokens = 1 + place % 16, _ENDLESS
        if case == _ARRIVALS:
            length, max_tokens = _TOKENS, -(-_TOKENS * place // rows)
        prompt = self._random.choices(range(100, 1000), k=length)
        asked = {"max_tokens": max_tokens, "ignore_eos": True, **params}
        self.ask(prompt, seed=self._random.getrandbits(31), **asked)

    def _send(self, message: Any) -> None:
        to_message = getattr(message, "message", None)  # of the outputs of a step, as arrays
        self._encode(message if to_message is None else to_message())


def measure(rows: Sequence[int], model: str, cases: Mapping[str, Mapping[str, Any]]) -> Times:
    """Return the fastest step of several rounds."""
    steps = HostSteps(max(rows), model, is_ahead=cases is CASES)
    spare_startup_objects()  # as the engine process does
    return {
        f"{case}, {count}": min(
            (steps.measure(case, params, count) for _ in range(_ROUNDS)), key=step_seconds
        )
        for case, params in cases.items()
        for count in rows
    }


def step_seconds(parts: dict[str, float]) -> float:
    """Return the seconds of `EngineCore.step`."""
    return sum(parts[part] for part in STEP_PARTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the milliseconds of a step and of its parts."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.host_steps", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16, 64, 256, 1024))
    parser.add_argument("--model", default="demo", help="a folder, for its vocabulary")
    parser.add_argument("--grammars", action="store_true", help="structured output instead")
    options = parser.parse_args(arguments)
    cases = grammars() if options.grammars else CASES
    rows = []
    for case, parts in measure(options.rows, options.model, cases).items():
        times = (step_seconds(parts), *(parts[part] for part in PARTS))
        rows.append([case, *(f"{1e3 * each:.3f}" for each in times)])
    print(markdown(["ms per step", "step", *PARTS], rows))


if __name__ == "__main__":
    main()
