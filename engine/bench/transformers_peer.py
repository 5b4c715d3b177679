"""TransformersPeer: the same shape in transformers, given the same requests."""

from __future__ import annotations

import gc
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from engine.bench.offline import Offline
from engine.bench.part import Figures
from engine.bench.shapes import Shape
from engine.bench.workload import Workload

Requests = Sequence[tuple[list[int], int]]

_WARM_UP_TOKENS = 2
_POLL_S = 0.5
_MOST_S = 80.0  # limit per part, so that others get their turn
_CPU_MEMORY = 0.01  # share of free memory
_CPU_TOKENS = 256  # tokens per step


class TransformersPeer:
    """A seeded random model of `shape`, created on `device`.

    Args:
        folder: its `config.json` describes the model.
        deadline: by time.time(); work still running then is ended.

    Attributes:
        attention: the attention implementation that transformers chose last.
    """

    def __init__(
        self, shape: Shape, workload: Workload, folder: Path, device: torch.device, deadline: float
    ) -> None:
        self.deadline = deadline
        self.attention = ""
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        torch.manual_seed(0)
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        # The default takes nearly all free memory; on a CPU that is shared with all processes.
        self._batching = (
            ContinuousBatchingConfig(max_memory_percent=_CPU_MEMORY, max_batch_tokens=_CPU_TOKENS)
            if device.type == "cpu"
            else ContinuousBatchingConfig()
        )
        # No token ends a sequence; this also avoids a warning per sequence.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def generate_batch(self, requests: Requests) -> tuple[float, int]:
        """Complete `requests` with continuous batching; return seconds and tokens.

        As transformers' `generate_batch`, but each request has its own number of tokens.

        Raises:
            TimeoutError: it takes too long.
            RuntimeError: a request failed.
        """
        # Takes more than a second, which only the processes that call this should spend.
        from transformers.generation.continuous_batching.utils import WorkloadHints

        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = self._model.continuous_batching_context_manager(
            generation_config=settings,
            continuous_batching_config=self._batching,
            block=True,
            timeout=5,
            workload_hints=WorkloadHints(
                max_prompt_length=max(len(prompt) for prompt, _ in requests),
                max_generated_length=max(max_tokens for _, max_tokens in requests),
                num_requests=len(requests),
            ),
        )
        end = self._end()
        with manager as batching:
            self.attention = self._model.config._attn_implementation
            warm_up = [(prompt, _WARM_UP_TOKENS) for prompt, _ in requests[:8]]
            self._complete(batching, warm_up, end)
            start = time.perf_counter()
            num_tokens = self._complete(batching, requests, end)
            return time.perf_counter() - start, num_tokens

    @torch.inference_mode()
    def generate(self, requests: Requests) -> tuple[float, int]:
        """Complete `requests` as one static batch; return seconds and requested tokens.

        Raises:
            TimeoutError: it takes too long.
        """
        self.attention = self._model.config._attn_implementation
        longest = max(len(prompt) for prompt, _ in requests)
        rows = [[0] * (longest - len(prompt)) + prompt for prompt, _ in requests]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
        inputs = {
            "input_ids": torch.tensor(rows, device=self._model.device),
            "attention_mask": torch.tensor(mask, device=self._model.device),
        }
        self._model.generate(**inputs, max_new_tokens=_WARM_UP_TOKENS)
        most = max(max_tokens for _, max_tokens in requests)
        left = max(self._end() - time.time(), 0.1)
        start = time.perf_counter()
        output = self._model.generate(**inputs, max_new_tokens=most, max_time=left)
        num_steps = output.shape[1] - longest
        if num_steps < most:
            raise TimeoutError(f"{num_steps} of {most} steps were done when its time was over")
        return time.perf_counter() - start, sum(max_tokens for _, max_tokens in requests)

    def clear(self) -> None:
        """Free the memory of completed requests."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _end(self) -> float:
        """Return the time limit of a part that begins now."""
        return min(self.deadline, time.time() + _MOST_S)

    def _complete(self, batching: Any, requests: Requests, end: float) -> int:
        for prompt, max_tokens in requests:
            batching.add_request(prompt, max_new_tokens=max_tokens)
        num_tokens = ended = 0
        while ended < len(requests):
            result = batching.get_result(timeout=_POLL_S)
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


@dataclass(frozen=True)
class _TransformersPart(Offline):
    session: ClassVar[str] = "transformers"

    @abstractmethod
    def complete(self, session: TransformersPeer, requests: Requests) -> tuple[float, int]:
        """Complete the requests; return seconds and tokens."""

    def measure(self, session: TransformersPeer) -> Figures:  # type: ignore[override]
        requests = self.requests()
        seconds, num_tokens = self.complete(session, requests)
        assert num_tokens == sum(max_tokens for _, max_tokens in requests)
        return {
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "attention": session.attention,
        }


@dataclass(frozen=True)
class ContinuousBatching(_TransformersPart):
    """The same requests through `generate_batch` of transformers."""

    @property
    def name(self) -> str:
        return f"transformers continuous batching, {self.count} sequences"

    def complete(self, session: TransformersPeer, requests: Requests) -> tuple[float, int]:
        return session.generate_batch(requests)


@dataclass(frozen=True)
class StaticBatching(_TransformersPart):
    """The same requests through `generate` of transformers, as one batch."""

    @property
    def name(self) -> str:
        return f"transformers generate, {self.count} sequences"

    def complete(self, session: TransformersPeer, requests: Requests) -> tuple[float, int]:
        return session.generate(requests)
