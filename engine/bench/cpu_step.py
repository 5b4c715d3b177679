"""`python -m engine.bench.cpu_step CHECKPOINT`: the time of a step on a CPU, by part.

Each part is printed next to its floor: the time to read its weights, KV or states, or to multiply
with them, whichever is longer, at the rates measured on this machine in the same minute.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.bench import ceilings, floors
from engine.bench.ceilings import timed
from engine.bench.steps import Steps
from engine.bench.tables import markdown, sizes
from engine.errors import TridentError
from engine.execution.model_runner import ModelRunner
from engine.models.decoder import FusedLayers
from engine.models.spec import AttentionSpec, ConvSpec, DeltaSpec, ModelSpec
from kernels.cpu.draw import draw_tokens

_WARM_UP_STEPS = 3
_STEPS = 20
_PROMPTS = 3
_BUDGET = 2048  # tokens per step
# Of a weight in a layer; in 4 bits each 32 have a scale and an offset.
_WEIGHT_BYTES = {None: 2.0, "int8": 1.0, "int4": 0.625}

Parts = dict[str, float]  # seconds


class CpuStep(Steps):
    """Decode steps of an engine on a CPU, and steps of one prompt, timed by part.

    Args:
        most, context: sequences of a step at most, and their tokens.
        longest_prompt: tokens of a step of one prompt, at most.

    Raises:
        ValueError: its layers are not run by the C++ kernels, which time their parts.
    """

    def __init__(
        self,
        checkpoint: Path,
        quantization: str | None,
        *,
        most: int = 1,
        context: int = 1,
        longest_prompt: int = 0,
    ) -> None:
        budget = max(_BUDGET, 2 * most, longest_prompt)
        prefill_steps = -(-most * context // (budget - most))  # first ones decode
        decoded = prefill_steps + _WARM_UP_STEPS + _STEPS + most + 8
        super().__init__(
            {
                "model": str(checkpoint),
                "device": "cpu",
                "quantization": quantization,
                "max_num_seqs": most,
                "max_num_batched_tokens": budget,
                "max_model_len": max(context + decoded, longest_prompt + 1),
            }
        )
        self._quantization = quantization
        runner = self.core._runner
        assert isinstance(runner, ModelRunner)
        self._model = runner.model
        fused = self._model.model.fused
        if not isinstance(fused, FusedLayers):
            raise ValueError(
                "no kernel for this CPU and dtype runs whole layers and times their parts; `python "
                "-m kernels.cpu` builds the kernels"
            )
        self._layers = fused
        self._spec = self._model.spec

    def measure(self, batch: int, context: int) -> tuple[float, Parts]:
        """Return the seconds of a step and of its parts, means over several steps.

        Raises:
            ValueError: the KV cache cannot hold so many sequences of `context` tokens.
        """
        self.fill(batch, context)
        self.run(_WARM_UP_STEPS, batch)
        step, parts = self._steps(_STEPS)
        with torch.inference_mode():
            hidden = torch.randn(batch, self._spec.hidden_size).to(torch.bfloat16)
            head = partial(self._model.compute_logits, hidden)
            zeros = torch.zeros(batch, dtype=torch.float64)
            columns = (zeros, zeros.int(), zeros + 1, zeros, zeros)
            parts["lm_head"] = timed(head).median
            parts["draw"] = timed(partial(draw_tokens, head(), *columns)).median
        self.clear()
        return step, parts

    def measure_prompt(self, length: int) -> tuple[float, Parts]:
        """Return the seconds of a step of one prompt of `length` tokens, and of its parts.

        The fastest of several: the first takes memory from the system.
        """
        found = []
        for seed in range(_PROMPTS):
            self.add(self.prompts([length], seed=seed), max_tokens=1)
            found.append(self._steps(1))
            self.clear()
        return min(found, key=lambda each: each[0])

    def decode_floors(self, batch: int, context: int, limits: floors.Ceilings) -> Parts:
        """Return the minimum seconds of parts of a decode step; other parts have no floor."""
        tokens = batch * (context + _WARM_UP_STEPS + _STEPS // 2)
        return self._floors(batch, batch, batch, tokens, tokens, limits)

    def prompt_floors(self, length: int, limits: floors.Ceilings) -> Parts:
        """Return the minimum seconds of parts of a step of one prompt."""
        return self._floors(length, 1, 0, length, length * (length + 1) // 2, limits)

    def _floors(
        self,
        tokens: int,
        rows: int,
        sampled: int,
        keys: int,
        pairs: int,
        limits: floors.Ceilings,
    ) -> Parts:
        spec, rate = self._spec, "int8" if self._quantization else "bf16"

        def gemm(size: int, weight_bytes: float, tokens: int) -> float:
            return floors.bound(weight_bytes * size, 2 * tokens * size, limits, rate)

        weight_bytes = _WEIGHT_BYTES[self._quantization]
        found = {
            name: gemm(size, weight_bytes, tokens) for name, size in gemm_parameters(spec).items()
        }
        heads = sum(attention.num_heads * attention.head_dim for attention in spec.attentions)
        found["attention"] = floors.bound(
            spec.kv_bytes_per_token(torch.bfloat16) * keys, 4 * heads * pairs, limits
        )
        if numbers := sum(s.heads * s.key_dim * s.value_dim for s in spec.state_shapes):
            # A state is read and written; each of its numbers decays, is recalled, changed and
            # multiplied with the query.
            found["state"] = floors.bound(
                2 * rows * spec.state_bytes(torch.bfloat16), 8 * numbers * tokens, limits
            )
        if sampled:
            head_bytes = 1 if self._quantization else 2
            found["lm_head"] = gemm(spec.hidden_size * spec.vocab_size, head_bytes, sampled)
        return found

    def _steps(self, count: int) -> tuple[float, Parts]:
        """Return the seconds of a step, and of those of its parts that the layers time."""
        self._layers.take_seconds()
        start = time.perf_counter()
        for _ in range(count):
            self.core.step()
        step = (time.perf_counter() - start) / count
        return step, {part: each / count for part, each in self._layers.take_seconds().items()}


def gemm_parameters(spec: ModelSpec) -> dict[str, int]:
    """Return how many parameters of all layers each part of a step multiplies with."""
    found: Counter[str] = Counter()
    for layer in spec.layers:
        match layer.mixer:
            case AttentionSpec() as attention:
                values = attention.num_heads * attention.head_dim
                keys = attention.num_kv_heads * attention.head_dim
                found["qkv_proj"] += values * (1 + attention.has_gate) + 2 * keys
                found["o_proj"] += values
            case ConvSpec() as conv:
                found["in_proj"] += 3 * conv.channels
                found["out_proj"] += conv.channels
            case DeltaSpec() as delta:
                values = delta.num_heads * delta.value_dim
                found["in_proj"] += delta.channels + values + 2 * delta.num_heads
                found["out_proj"] += values
        found["gate_up_proj"] += 2 * layer.mlp.size
        found["down_proj"] += layer.mlp.size
    return {part: spec.hidden_size * size for part, size in found.items()}


def report(
    what: str, measure: Callable[[], tuple[float, Parts]], floors_of: Callable[[Parts], Parts]
) -> str:
    """Return a step's parts beside their floors, by ceilings measured before and after it."""
    before = ceilings.measure()
    step, parts = measure()
    limits = {name: max(rate, before[name]) for name, rate in ceilings.measure().items()}
    found = floors_of(limits)
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    parts["all else"] = step - sum(parts.values())
    rows = [
        (name, f"{1e3 * taken:.2f}", f"{taken / step:.1%}", *_against(found.get(name), taken))
        for name, taken in parts.items()
    ]
    total = ("whole step", f"{1e3 * step:.2f}", "", *_against(sum(found.values()), step))
    machine = (
        f"this machine reads {limits['read'] / 1e9:.1f} GB/s and multiplies "
        f"{limits['bf16'] / 1e12:.2f} TFLOP/s in bf16, {limits['int8'] / 1e12:.2f} TOP/s in int8"
    )
    table = markdown(("part", "ms", "of step", "floor ms", "of floor"), [total, *rows])
    return f"\n{what}, {torch.get_num_threads()} threads; {machine}\n\n{table}"


def _against(floor: float | None, taken: float) -> tuple[str, str]:
    return ("", "") if floor is None else (f"{1e3 * floor:.2f}", f"{floor / taken:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each batch, or for each prompt."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.cpu_step", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument(
        "--batches",
        type=sizes,
        default="1,16,64",
        help="sequences per step; several values are measured in turn",
    )
    parser.add_argument(
        "--context", type=int, default=160, help="tokens of each sequence in the KV cache"
    )
    parser.add_argument(
        "--prompts",
        type=sizes,
        help="prompt tokens of a step; several values are measured in turn, in place of --batches",
    )
    options = parser.parse_args(arguments)
    context = options.context
    if context < 1:
        parser.error("--context: must be at least 1")
    most: dict[str, Any] = {"most": max(options.batches), "context": context}
    if options.prompts:
        most = {"longest_prompt": max(options.prompts)}
    form = options.quantization or "bf16"
    try:
        step = CpuStep(options.checkpoint, options.quantization, **most)
        for length in options.prompts or ():
            work = (partial(step.measure_prompt, length), partial(step.prompt_floors, length))
            print(report(f"{form}, a prompt of {length} tokens", *work))
        for batch in () if options.prompts else options.batches:
            measure = partial(step.measure, batch, context)
            work = (measure, partial(step.decode_floors, batch, context))
            print(report(f"{form}, {batch} sequences of {context} tokens", *work))
    except (ValueError, TridentError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
