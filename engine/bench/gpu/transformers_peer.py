"""The engine's requests through continuous batching of transformers, in the same shape."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.bench.checkpoint import write_checkpoint
from engine.bench.gpu.engine import transformers_key
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.gpu.workload import Workload
from kernels.bench.shapes import Shape

Requests = Sequence[tuple[list[int], int]]

_MOST_S = 80.0  # limit per part, so that others get their turn
# The default takes nearly all free memory; on a CPU that is shared with all processes.
_ON_CPU = {"max_memory_percent": 0.01, "max_batch_tokens": 256}


def group(shape: Shape, workload: Workload) -> Group:
    """Return the part that stands beside the engine's."""
    parts = (Part(transformers_key(shape, workload), TransformersSession.generate_batch),)
    session = partial(TransformersSession, shape, workload)
    return Group(f"{shape.label} transformers", "transformers", parts, session)


class TransformersSession:
    """A seeded random model of `shape`, created on `device`.

    Args:
        deadline: by time.time(); work still running then is ended.
    """

    def __init__(
        self, shape: Shape, workload: Workload, device: torch.device, deadline: float
    ) -> None:
        # Takes seconds, which only the processes that measure it should spend.
        from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig

        self._requests = workload.offline(shape.vocab)[: workload.shared]
        self._deadline = deadline
        with TemporaryDirectory() as folder:
            write_checkpoint(shape, Path(folder))
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        torch.manual_seed(0)
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._batching = ContinuousBatchingConfig(**_ON_CPU if device.type == "cpu" else {})

    def generate_batch(self) -> Figures:
        """Complete the requests; return the figures.

        As transformers' `generate_batch`, but each request has its own number of tokens.

        Raises:
            TimeoutError: it takes too long.
            RuntimeError: a request failed.
        """
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        # No token ends a sequence; this also avoids a warning per sequence.
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._model.generation_config = settings

        requests = self._requests
        manager = self._model.continuous_batching_context_manager(
            generation_config=settings,
            continuous_batching_config=self._batching,
            block=True,
            timeout=5,
            workload_hints=WorkloadHints(
                max_prompt_length=max(len(prompt) for prompt, _ in requests),
                max_generated_length=max(most for _, most in requests),
                num_requests=len(requests),
            ),
        )
        end = min(self._deadline, time.time() + _MOST_S)
        with manager as batching:
            attention = self._model.config._attn_implementation
            _complete(batching, [(prompt, 2) for prompt, _ in requests[:8]], end)  # warm up
            start = time.perf_counter()
            num_tokens = _complete(batching, requests, end)
            seconds = time.perf_counter() - start
        assert num_tokens == sum(most for _, most in requests)
        return {
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "remarks": [f"with attention {attention}"],
        }

    def clear(self) -> None:
        """Free the memory of completed requests."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _complete(batching: Any, requests: Requests, end: float) -> int:
    """Complete the requests; return the number of their tokens."""
    for prompt, most in requests:
        batching.add_request(prompt, max_new_tokens=most)
    num_tokens = ended = 0
    while ended < len(requests):
        result = batching.get_result(timeout=0.5)
        if result is None:
            if not batching.is_running():
                raise RuntimeError("its generation thread has ended")
        elif result.error is not None:
            raise RuntimeError(str(result.error))
        elif result.is_finished():
            ended += 1
            num_tokens += len(result.generated_tokens)
        if time.time() > end:
            raise TimeoutError(f"{ended} of {len(requests)} had ended when its time was over")
    return num_tokens
