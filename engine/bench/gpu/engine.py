"""The engine's parts: decode steps, prefill, TTFT and a workload offline, each with its floor."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from engine.bench import floors
from engine.bench.checkpoint import write_checkpoint
from engine.bench.gpu.part import Figures, Group, Part
from engine.bench.gpu.workload import Workload, prompts
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import AddRequest
from engine.token_ids import pack_token_ids
from kernels.bench.case import Aim
from kernels.bench.shapes import Shape

_UNBOUNDED = 2**31
_REPEATS = 5  # of a prefill
_COMPILE_BYTES = 2**30  # of KV cache while only compiling
_AIMS = {
    ("0.5b", 1): Aim(seconds=600e-6),
    ("8b", 1): Aim(share=0.85),
    ("8b", 64): Aim(share=0.75),
    ("8b", 256): Aim(share=0.75),
}


def group(shape: Shape, workload: Workload) -> Group:
    """Return all parts of a model, the most important first."""

    def decode(batch: int) -> Part:
        return Part(
            f"{shape.label} decode step, B = {batch}",
            partial(EngineSession.decode, batch=batch),
            lambda figures, ceilings: floors.decode_seconds(
                shape, batch, round(batch * figures["context"]), ceilings
            ),
            _AIMS.get((shape.label, batch)),
        )

    def prefill(name: str, lengths: list[int], aim: Aim | None) -> Part:
        return Part(
            f"{shape.label} {name}",
            partial(EngineSession.prefill, lengths=lengths),
            lambda figures, ceilings: floors.prefill_seconds(shape, lengths, ceilings),
            aim,
        )

    long = workload.prefill
    lengths = [(len(prompt), most) for prompt, most in workload.offline(shape.vocab)]
    parts = (
        *(decode(batch) for batch in workload.batches),
        prefill(f"prefill, 1 x {long} tokens", [long], Aim(share=0.6)),
        prefill(f"prefill, 8 x {long // 8} tokens", [long // 8] * 8, Aim(share=0.6)),
        prefill(f"TTFT of {workload.prompt} tokens alone", [workload.prompt], None),
        Part(
            f"{shape.label} offline, {workload.sequences} sequences",
            EngineSession.offline,
            lambda figures, ceilings: floors.offline_seconds(shape, lengths, ceilings),
        ),
    )
    session = partial(EngineSession, shape, workload)
    return Group(
        f"{shape.label} engine", "engine", parts, session, partial(_compile, shape, workload)
    )


def _compile(shape: Shape, workload: Workload, device: torch.device, parts: Sequence[Part]) -> None:
    """Load a model of one layer: kernels do not depend on the number of layers."""
    os.environ["TRIDENT_KV_CACHE_MEMORY_BYTES"] = str(_COMPILE_BYTES)
    EngineSession(replace(shape, layers=1), workload, device, 0.0)


class EngineSession:
    """An engine with dummy weights, with the settings of TRIDENT_* variables.

    Args:
        deadline: by time.time(); long runs end then.
    """

    def __init__(
        self, shape: Shape, workload: Workload, device: torch.device, deadline: float
    ) -> None:
        self.workload, self.deadline = workload, deadline
        self._vocab, self._has_gpu = shape.vocab, device.type == "cuda"
        self._next_uid = 0
        with TemporaryDirectory() as folder:
            write_checkpoint(shape, Path(folder))
            settings = {
                **EngineConfig.overrides(os.environ),
                "model": folder,
                "load_format": "dummy",
                "device": device.type,
                "max_model_len": workload.max_model_len,
                "max_num_seqs": max(*workload.batches, workload.sequences),
                "max_num_batched_tokens": max(workload.prefill, *workload.batches),
                "max_num_queued_reqs": _UNBOUNDED,
                "max_num_queued_tokens": _UNBOUNDED,
            }
            self.core = EngineCore(EngineConfig.parse(settings))

    def decode(self, batch: int) -> Figures:
        """Return the seconds of a step of `batch` sequences."""
        steps, before = self.workload.decode_steps, self.workload.warm_up_steps
        # The middle step has the workload's context.
        length = self.workload.context - before - steps // 2
        # The first sequences decode while the last ones prefill.
        most = before + steps + batch + 2
        waiting = {
            self._add(prompt, most) for prompt in prompts([length] * batch, self._vocab, seed=batch)
        }
        while waiting:
            waiting -= {*self.core.step().uids.tolist()}
        self._steps(before, batch)
        context = sum(each.num_tokens for each in self.core.scheduler.running) / batch
        self._synchronize()
        start = time.perf_counter()
        self._steps(steps, batch)
        self._synchronize()
        seconds = (time.perf_counter() - start) / steps
        return {
            "seconds": seconds,
            "tokens_per_second": batch / seconds,
            "context": context + steps / 2,
        }

    def prefill(self, lengths: list[int]) -> Figures:
        """Return the seconds from the arrival of prompts to their first tokens, in one step."""
        times = []
        for seed in range(_REPEATS + 1):  # other prompts each time, to miss the prefix cache
            asked = [(prompt, 1) for prompt in prompts(lengths, self._vocab, seed)]
            times.append(self._complete(asked))
        return {"seconds": median(times[1:])}  # the first may include compilation

    def offline(self) -> Figures:
        """Return the seconds to complete all requests of the workload, given at once."""
        requests = self.workload.offline(self._vocab)
        # As nano-vllm's benchmark samples.
        seconds = self._complete(requests, temperature=0.6, stream=False)
        return {
            "seconds": seconds,
            "tokens_per_second": sum(most for _, most in requests) / seconds,
        }

    def clear(self) -> None:
        """Abort unfinished requests, and assert that no block has leaked."""
        clear(self.core)

    def _complete(
        self,
        requests: list[tuple[list[int], int]],
        temperature: float = 0.0,
        *,
        stream: bool = True,
    ) -> float:
        """Return the seconds to complete `requests`: prompts, and exact numbers of tokens.

        Raises:
            TimeoutError: the deadline has passed.
            RuntimeError: the engine failed a request.
        """
        self._synchronize()
        start, num_tokens = time.perf_counter(), 0
        for prompt, most in requests:
            self._add(prompt, most, temperature=temperature, stream=stream)
        while self.core.has_unfinished_requests():
            outputs = self.core.step()
            for failed in outputs.failures:
                raise RuntimeError(f"request {failed.uid} failed: {failed.message}")
            num_tokens += sum(len(output.token_ids) for output in outputs.rows())
            if time.time() > self.deadline:
                raise TimeoutError("no time was left to end it")
        self._synchronize()
        assert num_tokens == sum(most for _, most in requests)
        return time.perf_counter() - start

    def _add(
        self, prompt: list[int], most: int, *, temperature: float = 0.0, stream: bool = True
    ) -> int:
        self._next_uid += 1
        params = {"max_tokens": most, "temperature": temperature, "ignore_eos": True}
        self.core.add_request(
            AddRequest(self._next_uid, pack_token_ids(prompt), params, stream=stream)
        )
        return self._next_uid

    def _steps(self, count: int, batch: int) -> None:
        for _ in range(count):
            assert len(self.core.step()) == batch, "a sequence has got no token, or ended"

    def _synchronize(self) -> None:
        if self._has_gpu:
            torch.cuda.synchronize()


def clear(core: EngineCore) -> None:
    """Abort unfinished requests, and assert that no block has leaked."""
    for uid in list(core.scheduler.unfinished):
        core.abort(uid)
    while core.has_unfinished_requests():
        core.step()
    core.check_integrity()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
