"""ModelRunner: owns the weights and the KV cache, and runs the steps that the scheduler decides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.core.scheduler import Schedule
from engine.execution.attention import LayerCache, allocate_kv_cache, attention_backend
from engine.execution.batch import BatchRow, build_batch
from engine.execution.sampler import sample
from engine.memory import require_room_for_weights
from engine.models.config import ModelConfig
from engine.models.registry import build_model
from engine.request import SampledToken
from engine.weights import load_weights
from kernels.block_copy import BlockCopier


class ModelRunner:
    """One device's share of the work; knows nothing of queues or clients."""

    def __init__(
        self,
        checkpoint: Path,
        model_config: ModelConfig,
        *,
        max_model_len: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load the weights of `checkpoint`; `on_progress` hears of (loaded, total) bytes.

        Raises:
            CheckpointError: the checkpoint is incomplete or broken.
            InsufficientMemoryError: the weights do not fit.
            UnsupportedError: the device has no kernels for the model or the blocks.
        """
        self.model_config = model_config
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.attention = attention_backend(device, block_size=block_size)
        self.attention.check(model_config)
        build = partial(build_model, model_config, max_model_len=max_model_len, dtype=dtype)
        outline = build(device=torch.device("meta"))  # shapes alone, nothing is allocated
        require_room_for_weights(sum(p.nbytes for p in outline.parameters()), device)
        self.model = build(device=device)
        load_weights(self.model, checkpoint, on_progress=on_progress)
        self.kv_cache: list[LayerCache] = []
        self._block_copier: BlockCopier | None = None

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache, `num_blocks` blocks in every layer."""
        self.kv_cache = allocate_kv_cache(
            self.model_config, num_blocks, self.block_size, dtype=self.dtype, device=self.device
        )
        self._block_copier = BlockCopier([cache for layer in self.kv_cache for cache in layer])

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[SampledToken]:
        """Run one step; return a token for each row that wants one, in order."""
        if schedule.copies:
            assert self._block_copier is not None
            sources, destinations = zip(*schedule.copies, strict=True)
            self._block_copier.copy(sources, destinations)
        batch = build_batch(
            [
                BatchRow(
                    token_ids=row.request.token_ids[
                        row.request.num_computed_tokens : row.request.num_computed_tokens
                        + row.num_tokens
                    ],
                    start=row.request.num_computed_tokens,
                    block_ids=row.request.block_ids,
                    wants_logits=row.wants_token,
                )
                for row in schedule.rows
            ],
            block_size=self.block_size,
            device=self.device,
        )
        hidden = self.model(batch, self.kv_cache, self.attention.plan(batch))
        requests = [row.request for row in schedule.rows if row.wants_token]
        if not requests:
            return []
        logits = self.model.compute_logits(hidden[batch.logits_rows])
        return sample(logits, requests)
