"""`python -m engine.bench.cpu_step CHECKPOINT`: the time of a step on a CPU, by part.

Each part is printed next to its floor: the time to read its weights or its KV, or to multiply with
them, whichever is longer, at the rates measured on this machine in the same minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from engine.bench import cpu_ceilings
from engine.bench.driver import clear
from engine.bench.stopwatch import repeated_seconds, seconds
from engine.bench.workload import prompts
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import TridentError
from engine.execution.model_runner import ModelRunner
from engine.models.causal_lm import CausalLM
from engine.models.fused_layers import FusedLayers
from engine.protocol import AddRequest
from engine.token_ids import pack_token_ids
from kernels.cpu.draw import draw_tokens

_WARM_UP_STEPS = 3
_STEPS = 20
_PROMPTS = 3
_BUDGET = 2048  # tokens per step
# Of a weight in a layer; in 4 bits each 32 have a scale and an offset.
_WEIGHT_BYTES = {None: 2.0, "int8": 1.0, "int4": 0.625}


class CpuStep:
    """Decode steps of an engine on a CPU, and steps of one prompt, timed by part.

    Raises:
        ValueError: its layers are not run by the C++ kernels, which time their parts.
    """

    def __init__(
        self,
        checkpoint: Path,
        quantization: str | None,
        *,
        most: int,
        context: int,
        longest_prompt: int = 0,
    ) -> None:
        budget = max(_BUDGET, 2 * most, longest_prompt)
        prefill_steps = -(-most * context // (budget - most))  # first ones decode
        self.core = EngineCore(
            EngineConfig.parse(
                {
                    "model": str(checkpoint),
                    "device": "cpu",
                    "quantization": quantization,
                    "max_num_seqs": most,
                    "max_num_batched_tokens": budget,
                    "max_model_len": max(
                        context + prefill_steps + _WARM_UP_STEPS + _STEPS + most + 8,
                        longest_prompt + 1,
                    ),
                }
            )
        )
        self._is_quantized = quantization is not None
        self._weight_bytes = _WEIGHT_BYTES[quantization]
        self._uid = 0
        fused = self._model.model.fused
        if not isinstance(fused, FusedLayers):
            raise ValueError(
                "on this machine, or in this dtype, no kernel runs whole layers and tells of their "
                "parts; `python -m kernels.cpu` builds those there are"
            )
        self._layers = fused

    @property
    def _model(self) -> CausalLM:
        runner = self.core._runner
        assert isinstance(runner, ModelRunner)
        return runner.model

    def measure(self, batch: int, context: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step and of its parts, means over several steps.

        Raises:
            ValueError: the KV cache cannot hold so many sequences of `context` tokens.
        """
        config = self._model.spec
        self._add([context] * batch, seed=batch, max_tokens=2**20)
        while len(self.core.step()) < batch:
            if not self.core.has_unfinished_requests():
                raise ValueError(f"no room in the KV cache for {batch} sequences of {context}")
        for _ in range(_WARM_UP_STEPS):
            self.core.step()
        self._layers.take_seconds()
        step = seconds(lambda: [self.core.step() for _ in range(_STEPS)]) / _STEPS
        taken = self._layers.take_seconds()
        parts = {name: total / _STEPS for name, total in taken.items()}
        with torch.inference_mode():
            hidden = torch.randn(batch, config.hidden_size).to(torch.bfloat16)
            logits = self._model.compute_logits(hidden)
            parts["lm_head"] = median(
                repeated_seconds(lambda: self._model.compute_logits(hidden), _STEPS)
            )
            zeros = torch.zeros(batch, dtype=torch.float64)
            columns = (zeros, zeros.int(), zeros + 1, zeros, zeros)
            parts["draw"] = median(repeated_seconds(lambda: draw_tokens(logits, *columns), _STEPS))
        clear(self.core)
        parts["all else"] = step - sum(parts.values())
        return step, parts

    def measure_prompt(self, length: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step of one prompt of `length` tokens, and of its parts.

        The fastest of several: the first takes memory from the system.
        """
        found: list[tuple[float, dict[str, float]]] = []
        for seed in range(_PROMPTS):
            self._add([length], seed=seed, max_tokens=1)
            self._layers.take_seconds()
            step = seconds(self.core.step)
            parts = self._layers.take_seconds()
            clear(self.core)
            parts["all else"] = step - sum(parts.values())
            found.append((step, parts))
        return min(found, key=lambda each: each[0])

    def _add(self, lengths: list[int], *, seed: int, max_tokens: int) -> None:
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        for prompt in prompts(lengths, self._model.spec.vocab_size, seed=seed):
            request = AddRequest(self._uid, pack_token_ids(prompt), params, stream=True)
            self.core.add_request(request)
            self._uid += 1

    def floors(self, batch: int, context: int, ceilings: dict[str, float]) -> dict[str, float]:
        """Return the minimum seconds of parts of a decode step; other parts have no floor."""
        tokens = batch * (context + _WARM_UP_STEPS + _STEPS // 2)
        floors = self._product_floors(batch, ceilings)
        floors["attention"] = self._attention_floor(tokens, tokens, ceilings)
        return floors

    def prompt_floors(self, length: int, ceilings: dict[str, float]) -> dict[str, float]:
        """Return the minimum seconds of parts of a step of one prompt."""
        floors = self._product_floors(length, ceilings)
        del floors["lm_head"]  # of the last token alone
        pairs = length * (length + 1) // 2
        floors["attention"] = self._attention_floor(length, pairs, ceilings)
        return floors

    def _attention_floor(self, keys: int, pairs: int, ceilings: dict[str, float]) -> float:
        """Return the floor for `keys` that are read, and `pairs` of a query and a key."""
        spec = self._model.spec
        return spec.num_layers * max(
            4 * keys * spec.num_kv_heads * spec.head_dim / ceilings["read"],
            4 * pairs * spec.num_heads * spec.head_dim / ceilings["bf16"],
        )

    def _product_floors(self, rows: int, ceilings: dict[str, float]) -> dict[str, float]:
        config = self._model.spec
        hidden, inner, dim = config.hidden_size, config.layers[0].mlp.size, config.head_dim
        heads, kv_heads, layers = config.num_heads, config.num_kv_heads, config.num_layers
        read, rate = ceilings["read"], ceilings["int8" if self._is_quantized else "bf16"]
        sizes = {
            "qkv_proj": layers * hidden * (heads + 2 * kv_heads) * dim,
            "o_proj": layers * hidden * heads * dim,
            "gate_up_proj": layers * 2 * hidden * inner,
            "down_proj": layers * hidden * inner,
        }
        floors = {
            name: max(self._weight_bytes * size / read, 2 * rows * size / rate)
            for name, size in sizes.items()
        }
        head = hidden * config.vocab_size
        head_bytes = 1 if self._is_quantized else 2
        return {**floors, "lm_head": max(head_bytes * head / read, 2 * rows * head / rate)}


def _print(step: float, parts: dict[str, float], floors: dict[str, float]) -> None:
    print(f"{'part':<14}{'ms':>9}{'of step':>9}{'floor ms':>10}{'of floor':>10}")
    rows: list[tuple[str, float, float | None]] = [("whole step", step, sum(floors.values()))]
    rows += [
        (name, taken, floors.get(name))
        for name, taken in sorted(parts.items(), key=lambda part: -part[1])
    ]
    for name, taken, floor in rows:
        against = "" if floor is None else f"{1e3 * floor:10.2f}{floor / taken:10.0%}"
        print(f"{name:<14}{1e3 * taken:9.2f}{taken / step:9.1%}{against}")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _batches(text: str) -> list[int]:
    return [_positive(batch) for batch in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each batch."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.cpu_step", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument(
        "--batches", type=_batches, default="1,16,64", help="sequences in a step, several in turns"
    )
    parser.add_argument("--context", type=_positive, default=160, help="tokens of each sequence")
    parser.add_argument(
        "--prompts",
        type=_batches,
        default=[],
        help="tokens of a prompt that is computed in one step, several in turns; without batches",
    )
    options = parser.parse_args(arguments)
    lengths = options.prompts
    batches, context = ([], 1) if lengths else (options.batches, options.context)
    try:
        step = CpuStep(
            options.checkpoint,
            options.quantization,
            most=max(batches, default=1),
            context=context,
            longest_prompt=max(lengths, default=0),
        )
    except (ValueError, TridentError) as error:
        parser.error(str(error))

    def show(
        what: str,
        measure: Callable[[], tuple[float, dict[str, float]]],
        floors: Callable[[dict[str, float]], dict[str, float]],
    ) -> None:
        before = cpu_ceilings.measure()
        try:
            step_seconds, parts = measure()
        except ValueError as error:
            parser.error(f"--batches, --context: {error}")
        after = cpu_ceilings.measure()
        ceilings = {name: max(rate, after[name]) for name, rate in before.items()}
        print(
            f"\n{options.quantization or 'bf16'}, {what}, {torch.get_num_threads()} threads; this "
            f"machine reads {ceilings['read'] / 1e9:.1f} GB/s and multiplies "
            f"{ceilings['bf16'] / 1e12:.2f} TFLOP/s in bf16, {ceilings['int8'] / 1e12:.2f} TOP/s "
            "in int8"
        )
        _print(step_seconds, parts, floors(ceilings))

    for batch in batches:
        show(
            f"{batch} sequences of {context} tokens",
            partial(step.measure, batch, context),
            partial(step.floors, batch, context),
        )
    for length in lengths:
        show(
            f"a prompt of {length} tokens",
            partial(step.measure_prompt, length),
            partial(step.prompt_floors, length),
        )


if __name__ == "__main__":
    main()
