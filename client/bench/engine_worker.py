"""`python -m client.bench.engine_worker`: the engine without Triton, started by `EngineAlone`.

Reads JSON lines from stdin: first the engine's settings, then one wave of requests per line.
Answers each with a JSON line on stdout. Exits at the end of stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import TridentError
from engine.sampling_params import SamplingParams
from engine.service.process.openmp import set_wait

if TYPE_CHECKING:
    from engine.llm import LLM


def run_wave(llm: LLM, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """Complete all prompts at once; return seconds, CPU seconds and the number of tokens."""
    params = SamplingParams.parse(sampling)
    started, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "num_tokens": sum(len(each.token_ids) for output in outputs for each in output.outputs),
    }


def main() -> None:
    """Serve waves until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output must not mix with answers

    def answer(fields: dict[str, Any]) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        settings = json.loads(sys.stdin.readline())
        set_wait(EngineConfig.parse(settings))
        from engine.llm import LLM  # after `set_wait`, because it imports torch

        llm = LLM(**settings)
    except TridentError as error:
        answer({"error": str(error)})
        return
    answer({})
    for line in sys.stdin:
        answer(run_wave(llm, **json.loads(line)))


if __name__ == "__main__":
    main()
