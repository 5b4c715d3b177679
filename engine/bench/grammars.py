"""`python -m engine.bench.grammars`: what structured output costs, for a checkpoint's vocabulary.

On the null device, at the rate of a GPU: the time that the loop waits for masks per step and per
token beside the time of a step, and how many tokens a step gives where the grammar forces some. No
weights are read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.bench.tool_sets import ToolSets, calls_schema, calls_tag
from engine.core.schedule import SamplingBatch
from engine.service.garbage import spare_startup_objects

_JSON = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,9}) ("." [0-9]{1,9})?
"""
_PROMPT = list(range(100, 116))
_WARM_UP_STEPS, _STEPS = 10, 100
_MAX_TOKENS = 256
_SIZE = 100_000


def cases() -> dict[str, dict[str, Any]]:
    """Return what is asked for, by name."""
    tools = ToolSets(0).tools(_SIZE)
    return {
        "any object": {"json": {"type": "object"}},
        "a tool's schema": {"json": tools[0]["function"]["parameters"]},
        "100 KB of tools, schema": {"json": calls_schema(tools)},
        "100 KB of tools, tags": {"structural_tag": calls_tag(tools)},
        "regex": {"regex": r"[A-Z][a-z]{1,20}( [A-Za-z0-9]{1,20}){5,40}\."},
        "EBNF of JSON": {"grammar": _JSON},
    }


class Bench(Steps):
    """An engine on the null device that serves `rows` sequences with the vocabulary of `model`."""

    def __init__(self, model: str, rows: int, step_ms: float) -> None:
        super().__init__(
            {
                "model": model,
                "device": f"null:{step_ms:g}",
                "max_num_seqs": rows,
                # One step ahead, sequences with grammars would take part in every other step.
                "async_scheduling": False,
            }
        )
        self._rows = rows
        self._seeds = count(1)
        self._masks_s, self._num_masks = 0.0, 0
        constraints: Any = self.core.scheduler.constraints
        constraints.batch = self._timed(constraints.batch)
        workers: Any = self.core.scheduler.mask_workers
        workers.begin, workers.wait = self._timed(workers.begin), self._timed(workers.wait)
        spare_startup_objects()

    def masks(self, asked: dict[str, Any] | None) -> tuple[float, float, float, float]:
        """Measure decode steps of all rows, each of which asks for a document after the other.

        Returns:
            seconds per step and for its masks, how many these are, and tokens per row of a step.
        """
        fields = {"structured_outputs": asked} if asked else {"ignore_eos": True}
        unfinished = self.core.scheduler.unfinished
        steps = num_tokens = num_rows = 0
        began = 0.0
        while steps < _WARM_UP_STEPS + _STEPS:
            for _ in range(self._rows - len(unfinished)):
                seed = next(self._seeds)
                self.ask(_PROMPT, max_tokens=_MAX_TOKENS, seed=seed, temperature=1.0, **fields)
            outputs = self.core.step()
            if len(self.core.scheduler.running) < self._rows // 2:
                continue  # the grammar is being compiled
            steps += 1
            if steps == _WARM_UP_STEPS:
                self._masks_s = 0.0
                self._num_masks = num_tokens = num_rows = 0
                began = time.monotonic()
            num_tokens += int(outputs.num_tokens.sum())
            num_rows += len(outputs)
        sums = (time.monotonic() - began, self._masks_s, self._num_masks)
        self.clear()
        step_s, masks_s, num_masks = (each / _STEPS for each in sums)
        return step_s, masks_s, num_masks, num_tokens / num_rows

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.monotonic()
            result = method(*args)
            self._masks_s += time.monotonic() - began
            if isinstance(result, SamplingBatch):
                self._num_masks += len(result.mask_rows)
            return result

        return timed


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=["demo"], help="checkpoint folders (default: demo)"
    )
    parser.add_argument("--rows", type=int, default=64, help="sequences per step (default: 64)")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="milliseconds per step (default: 10)"
    )
    options = parser.parse_args(arguments)
    step_ms = options.step_ms
    for model in options.models:
        bench = Bench(model, options.rows, step_ms)
        size = bench.core.ready.vocab_size
        print(f"\n{Path(model).name}: {size} tokens, {options.rows} rows, {step_ms:g} ms steps\n")
        rows = []
        for name, asked in {"no grammar": None, **cases()}.items():
            step_s, masks_s, num_masks, tokens = bench.masks(asked)
            each_s = masks_s / num_masks if num_masks else 0.0
            costs = (1e3 * step_s, 1e3 * masks_s, 1e6 * each_s, tokens)
            rows.append(
                (name, *(f"{each:.2f}" for each in costs), f"{1e3 * masks_s / step_ms:.0%}")
            )
        print(markdown(("", "ms/step", "masks, ms", "us/mask", "tokens", "share"), rows))


if __name__ == "__main__":
    main()
