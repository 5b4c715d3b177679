"""Runs a model over a paged KV cache, and states, as an engine does, with scattered blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.config.setting_types import Quantization
from engine.execution.attention.backend import attention_backend
from engine.execution.memory.kv_caches import (
    allocate_kv_cache,
    allocate_state_caches,
    caches_by_layer,
)
from engine.layers.rank_group import RankGroup
from engine.models.build import build_model, shard_of
from engine.models.kv_groups import KVGroups
from engine.models.process_weights import WeightProcessor, check_deterministic
from engine.models.registry import read_model_spec
from engine.quantization.registry import read_quantization
from engine.weights import as_stored, load_weights
from tests.factories.batches import BatchRow, build_batch

CPU = torch.device("cpu")


@dataclass
class Sequence:
    """Tokens known in advance, their blocks, and the logits computed so far.

    Attributes:
        state: block with its state; 0: that of a new sequence.
        owns_state: no other sequence reads that block.
        checkpoints: position -> block with the state there.
    """

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    state: int = 0
    owns_state: bool = False
    checkpoints: dict[int, int] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.num_computed


class PagedModel:
    """A loaded checkpoint with a cache of `num_blocks` blocks, allocated in random order.

    Layers that keep states have as many blocks of them. A sequence often writes another block than
    it reads, and saves its state at each end of a block of tokens.
    """

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
        self.spec = as_stored(read_model_spec(path), path)
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
        kv_cache = allocate_kv_cache(
            num_blocks,
            block_size,
            groups=KVGroups.single(len(self.spec.attentions)),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=dtype,
            device=CPU,
        )
        self._keeps_states = bool(self.spec.state_shapes)
        shapes = self.spec.state_shapes
        states = allocate_state_caches(num_blocks, shapes, dtype=dtype, device=CPU)
        self._cache = caches_by_layer(self.spec.layers, kv_cache, states)
        self._backend = attention_backend(
            CPU, dtype=dtype, block_size=block_size, deterministic=deterministic
        )
        self._free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self._free)
        self._free_states = list(self._free)
        self._draw = random.Random(seed)

    def start(
        self, token_ids: list[int], *, prefix: Sequence | None = None, num_cached: int = 0
    ) -> Sequence:
        """Allocate blocks for a sequence that takes its first `num_cached` tokens from `prefix`."""
        shared = [] if prefix is None else prefix.block_ids[: num_cached // self._block_size]
        blocks = -(-len(token_ids) // self._block_size) - len(shared)
        taken, self._free = self._free[:blocks], self._free[blocks:]
        assert len(taken) == blocks
        start = len(shared) * self._block_size
        state = prefix.checkpoints[start] if prefix and start and self._keeps_states else 0
        return Sequence(token_ids, shared + taken, start, state=state)

    def end(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that shares none."""
        self._free.extend(sequence.block_ids)
        self._free_states.extend(sequence.checkpoints.values())
        if sequence.owns_state:
            self._free_states.append(sequence.state)

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the given number of next tokens of each sequence, in one batch."""
        rows = [self._row(sequence, count) for sequence, count in work]
        batch = build_batch(rows, block_size=self._block_size, keeps_states=self._keeps_states)
        hidden = self.model(batch, self._cache, self._backend.plan(batch))
        logits = self.model.compute_logits(hidden)
        parts = logits.split([n for _, n in work])
        for (sequence, count), part, row in zip(work, parts, rows, strict=True):
            sequence.logits.append(part)
            sequence.num_computed += count
            if self._keeps_states:
                self._keep_states(sequence, row)

    def _row(self, sequence: Sequence, count: int) -> BatchRow:
        start, end = sequence.num_computed, sequence.num_computed + count
        row = BatchRow(sequence.token_ids[start:end], start, sequence.block_ids)
        if not self._keeps_states:
            return row
        first = (start // self._block_size + 1) * self._block_size
        writes = sequence.state
        if not sequence.owns_state or self._draw.random() < 0.5:
            writes = self._take_state()
        return replace(
            row,
            state_reads=sequence.state,
            state_writes=writes,
            state_saves=[
                (at, self._take_state()) for at in range(first, end + 1, self._block_size)
            ],
        )

    def _keep_states(self, sequence: Sequence, row: BatchRow) -> None:
        sequence.checkpoints |= dict(row.state_saves)
        if sequence.owns_state and sequence.state != row.state_writes:
            self._free_states.append(sequence.state)
        sequence.state, sequence.owns_state = row.state_writes, True

    def _take_state(self) -> int:
        return self._free_states.pop(self._draw.randrange(len(self._free_states)))

    def logits(self, token_ids: list[int], chunks: list[int] | None = None) -> Tensor:
        """Return the logits of every position, [len, vocab], computed chunk by chunk."""
        sequence = self.start(token_ids)
        for count in chunks or [len(token_ids)]:
            self.step([(sequence, count)])
        self.end(sequence)
        return torch.cat(sequence.logits)
