"""Device state of the running sequences: tables with one row, called a slot, per sequence.

The host runs one step ahead: it schedules a step before it has seen the tokens of the step before.
So sampled tokens stay on the device, which appends them to these tables and builds the inputs of
the next step from them. All tables are views of one buffer, so that the host's changes between two
steps take one upload and one launch (`kernels.step.slot_writes`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from kernels.step.sampling_columns import SAMPLING_COLUMNS, SamplingColumns

_ALIGNMENT = 32  # values: each table starts at a 128-byte cache line


@dataclass(frozen=True, slots=True)
class SeqSlotTables(SamplingColumns[Tensor]):
    """State of the running sequences, one in each of S slots. Made by `allocate`.

    Each value has one writer at a time. The host writes a whole slot when a sequence is admitted,
    its block table as it grows, tokens that no step has to sample, and the rows of the next step
    (`SlotWrites`). After that only
    `prepare_inputs` advances `num_computed_tokens`, and only `scatter_tokens` changes `token_ids`,
    `num_tokens` and `finish_reasons`, and only `count_tokens` changes `num_counted_tokens`. All of
    them run in stream order.

    It has the tables [S] of `SamplingColumns` too.

    Attributes:
        num_groups: of layers, each with blocks of its own.
        buffer: int32 [N], all tables, one after the other.
        token_ids: int32 [S, max_model_len], prompt, then output.
        block_tables: int32 [S, num_groups * max_blocks], ids of the sequence's KV blocks, those for
            one group of layers after the other.
        stop_token_ids: int32 [S, E], tokens that end the sequence, padded with -1.
        allowed_tokens: int32 [S, ceil(V / 32)]; bit t % 32 of word t // 32: token t may be drawn.
        bias_token_ids: int32 [S, B], tokens with a bias, each once.
        bias_values: float32 [S, B], added to their logits; -inf forbids a token.
        step_slots: int32 [S], slots of the rows of the next step, then -1.
        query_start_loc: int32 [S + 1], where their tokens begin.
        state_reads, state_writes: int32 [S], the blocks of states that these rows read and write,
            as in `kernels.state.states.StepStates`.
        state_saves: int32 [S, M, 2], likewise.
        num_tokens: int32 [S], prompt and output tokens so far.
        num_computed_tokens: int32 [S], tokens whose KV is cached or being computed.
        num_prompt_tokens: int32 [S].
        min_tokens: int32 [S], stop tokens among the first min_tokens output tokens are ignored.
        max_tokens: int32 [S], maximum number of output tokens.
        finish_reasons: int32 [S], RUNNING, STOP or LENGTH.
        features: int32 [S], the feature bits of `sampling_columns`.
        num_biases: int32 [S], entries of `bias_token_ids` and `bias_values`.
        num_counted_tokens: int32 [S], tokens that penalties have counted; 0 clears the counts.
        seeds: int64 [S], the bits of uint64 seeds.
    """

    num_groups: int
    buffer: Tensor
    token_ids: Tensor
    block_tables: Tensor
    stop_token_ids: Tensor
    allowed_tokens: Tensor
    bias_token_ids: Tensor
    bias_values: Tensor
    step_slots: Tensor
    query_start_loc: Tensor
    state_reads: Tensor
    state_writes: Tensor
    state_saves: Tensor
    num_tokens: Tensor
    num_computed_tokens: Tensor
    num_prompt_tokens: Tensor
    min_tokens: Tensor
    max_tokens: Tensor
    finish_reasons: Tensor
    features: Tensor
    num_biases: Tensor
    num_counted_tokens: Tensor
    seeds: Tensor

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        *,
        max_model_len: int,
        max_blocks: int,
        max_stop_token_ids: int,
        max_biases: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
        max_state_saves: int = 0,
    ) -> SeqSlotTables:
        """Return zeroed tables for `num_slots` sequences; `max_blocks` are of one group.

        `max_state_saves` is M; it is 0 for a model without states.

        Raises:
            ValueError: a size is not positive.
        """
        sizes = {
            "num_slots": num_slots,
            "max_model_len": max_model_len,
            "max_blocks": max_blocks,
            "max_stop_token_ids": max_stop_token_ids,
            "max_biases": max_biases,
            "vocab_size": vocab_size,
            "num_groups": num_groups,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: must be positive (got {size})")
        # A table that is in neither has one int32 per slot.
        shapes = {
            "token_ids": (num_slots, max_model_len),
            "block_tables": (num_slots, num_groups * max_blocks),
            "stop_token_ids": (num_slots, max_stop_token_ids),
            "allowed_tokens": (num_slots, -(-vocab_size // 32)),
            "bias_token_ids": (num_slots, max_biases),
            "bias_values": (num_slots, max_biases),
            "query_start_loc": (num_slots + 1,),
            "state_saves": (num_slots, max_state_saves, 2),
        }
        dtypes = {"bias_values": torch.float32, "seeds": torch.int64}
        dtypes |= {name: getattr(torch, each.dtype) for name, each in SAMPLING_COLUMNS.items()}
        parts = {}  # dtype, shape, and the part of the buffer
        size = 0
        for field in fields(cls):
            if field.name in ("num_groups", "buffer"):
                continue
            shape = shapes.get(field.name, (num_slots,))
            dtype = dtypes.get(field.name, torch.int32)
            end = size + prod(shape) * dtype.itemsize // 4
            parts[field.name] = dtype, shape, slice(size, end)
            size = -(-end // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.zeros(size, dtype=torch.int32, device=device)
        tables: dict[str, Any] = {
            name: buffer[part].view(dtype).view(shape)
            for name, (dtype, shape, part) in parts.items()
        }
        return cls(num_groups=num_groups, buffer=buffer, **tables)

    @property
    def num_slots(self) -> int:
        """S."""
        return self.num_tokens.shape[0]

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens per sequence."""
        return self.token_ids.shape[1]

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks per sequence in one group."""
        return self.block_tables.shape[1] // self.num_groups

    def clone(self) -> SeqSlotTables:
        """Return a copy that shares nothing with this one."""
        copy = SeqSlotTables.allocate(
            self.num_slots,
            max_model_len=self.max_model_len,
            max_blocks=self.max_blocks,
            max_stop_token_ids=self.stop_token_ids.shape[1],
            max_biases=self.bias_token_ids.shape[1],
            vocab_size=32 * self.allowed_tokens.shape[1],
            device=self.buffer.device,
            num_groups=self.num_groups,
            max_state_saves=self.state_saves.shape[1],
        )
        copy.buffer.copy_(self.buffer)
        return copy
