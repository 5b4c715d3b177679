"""EngineDriver: an engine of a given shape, and operations that all parts share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.bench.shapes import Shape
from engine.bench.workload import Workload
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import AddRequest, SequenceOutput
from engine.token_ids import pack_token_ids

_UNBOUNDED = 2**31


class EngineDriver:
    """An engine with dummy weights, used by one part at a time.

    Args:
        folder: a checkpoint of `shape` without weights.
        deadline: by time.time(); long runs end then.

    Raises:
        TridentError: the engine cannot be loaded.
    """

    def __init__(
        self, shape: Shape, workload: Workload, folder: Path, device: torch.device, deadline: float
    ) -> None:
        self.shape = shape
        self.workload = workload
        self.device = device
        self.deadline = deadline
        self.core = EngineCore(
            EngineConfig.parse(
                {
                    # The user's settings are measured, except for those below.
                    **EngineConfig.overrides(os.environ),
                    "model": str(folder),
                    "load_format": "dummy",
                    "device": device.type,
                    "max_model_len": workload.max_model_len,
                    "max_num_seqs": max(*workload.batches, workload.sequences),
                    "max_num_batched_tokens": max(workload.prefill, *workload.batches),
                    "max_num_queued_reqs": _UNBOUNDED,
                    "max_num_queued_tokens": _UNBOUNDED,
                }
            )
        )
        self._next_uid = 0

    @property
    def has_gpu(self) -> bool:
        """Whether the model runs on a device asynchronously to the host."""
        return self.device.type == "cuda"

    def add(
        self, prompt: list[int], max_tokens: int, *, temperature: float = 0.0, stream: bool = True
    ) -> int:
        """Queue a request for exactly `max_tokens` tokens; return its uid."""
        uid = self._next_uid
        self._next_uid += 1
        params = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
        self.core.add_request(AddRequest(uid, pack_token_ids(prompt), params, stream=stream))
        return uid

    def run(self, on_output: Callable[[SequenceOutput], None] = lambda output: None) -> None:
        """Step until all requests are done.

        Raises:
            TimeoutError: the deadline has passed.
            RuntimeError: the engine failed a request.
        """
        while self.core.has_unfinished_requests():
            outputs = self.core.step()
            for failed in outputs.failures:
                raise RuntimeError(f"request {failed.uid} failed: {failed.message}")
            for output in outputs.rows():
                on_output(output)
            if time.time() > self.deadline:
                raise TimeoutError("no time was left to end it")

    def clear(self) -> None:
        """Abort unfinished requests, and assert that no block has leaked."""
        clear(self.core)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, prompts: Sequence[list[int]]) -> float:
        """Return the seconds to prefill `prompts` at once and sample one token each."""
        self.synchronize()
        start = time.perf_counter()
        for prompt in prompts:
            self.add(prompt, 1)
        self.run()
        self.synchronize()
        return time.perf_counter() - start


def clear(core: EngineCore) -> None:
    """Abort unfinished requests, and assert that no block has leaked."""
    for uid in list(core.scheduler.unfinished):
        core.abort(uid)
    while core.has_unfinished_requests():
        core.step()
    core.check_integrity()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
