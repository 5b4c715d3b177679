"""Runs a model over a paged KV cache as an engine does, with scattered blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.config.setting_types import Quantization
from engine.execution.attention.backend import attention_backend
from engine.execution.memory.kv_caches import allocate_kv_cache
from engine.layers.rank_group import RankGroup
from engine.models.build import build_model, shard_of
from engine.models.kv_groups import KVGroups
from engine.models.process_weights import WeightProcessor, check_deterministic
from engine.models.registry import read_model_spec
from engine.quantization.registry import read_quantization
from engine.weights import load_weights, with_stored_head
from tests.factories.batches import BatchRow, build_batch

CPU = torch.device("cpu")


@dataclass
class Sequence:
    """Tokens known in advance, their blocks, and the logits computed so far."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.num_computed


class PagedModel:
    """A loaded checkpoint with a cache of `num_blocks` blocks, allocated in random order."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 128,
        num_blocks: int = 160,
        block_size: int = 4,
        seed: int = 0,
        deterministic: bool = False,
        quantization: Quantization | None = None,
        group: RankGroup | None = None,
        expert_parallel: bool = False,
    ) -> None:
        """Process the weights if they are to be deterministic; be a rank of `group`."""
        self.spec = with_stored_head(read_model_spec(path), path)
        build = partial(
            build_model,
            max_model_len=max_model_len,
            dtype=dtype,
            quantization=(stored := read_quantization(path)),
        )
        whole = None
        if group is not None:
            whole = build(self.spec, device=torch.device("meta"))
            self.spec = shard_of(whole, group.rank, group.size, expert_parallel=expert_parallel)
        self.model = build(self.spec, device=CPU, group=group)
        load_weights(self.model, path, whole=whole)
        if deterministic:
            check_deterministic(self.model, CPU)
            WeightProcessor(self.model, quantization, deterministic=True).finish()
        elif stored is not None:
            WeightProcessor(self.model, quantization).finish(stored.head)
        self.is_quantized = quantization is not None
        self._block_size = block_size
        self._cache = allocate_kv_cache(
            num_blocks,
            block_size,
            groups=KVGroups.single(self.spec.num_layers),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=dtype,
            device=CPU,
        )
        self._backend = attention_backend(
            CPU, dtype=dtype, block_size=block_size, deterministic=deterministic
        )
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)

    def start(
        self, token_ids: list[int], *, prefix: Sequence | None = None, num_cached: int = 0
    ) -> Sequence:
        """Allocate blocks for a sequence that takes its first `num_cached` tokens from `prefix`."""
        shared = [] if prefix is None else prefix.block_ids[: num_cached // self._block_size]
        blocks = -(-len(token_ids) // self._block_size) - len(shared)
        taken, self._free = self._free[:blocks], self._free[blocks:]
        assert len(taken) == blocks
        return Sequence(token_ids, shared + taken, len(shared) * self._block_size)

    def end(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that shares none."""
        self._free.extend(sequence.block_ids)

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the given number of next tokens of each sequence, in one batch."""
        rows = [
            BatchRow(s.token_ids[s.num_computed : s.num_computed + n], s.num_computed, s.block_ids)
            for s, n in work
        ]
        batch = build_batch(rows, block_size=self._block_size)
        hidden = self.model(batch, self._cache, self._backend.plan(batch))
        logits = self.model.compute_logits(hidden)
        for (sequence, count), part in zip(work, logits.split([n for _, n in work]), strict=True):
            sequence.logits.append(part)
            sequence.num_computed += count

    def logits(self, token_ids: list[int], chunks: list[int] | None = None) -> Tensor:
        """Return the logits of every position, [len, vocab], computed chunk by chunk."""
        sequence = self.start(token_ids)
        for count in chunks or [len(token_ids)]:
            self.step([(sequence, count)])
        self.end(sequence)
        return torch.cat(sequence.logits)
