"""Inputs of a step, built on the device from the slot tables of the running sequences.

The host chooses the sequences and the number of tokens each computes; the token ids, and whether a
sequence has already ended, are known only on the device when the step starts. The grid depends
only on the number of rows, so a step can be captured in a CUDA graph.

One program builds one row: its tokens, then its block table. One more program fills the padding
tokens after the last row. So each counter is read and advanced by one program.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, device
from kernels.checks import check_contiguous, check_device, check_dtype, check_output, check_shape
from kernels.step.sampling_columns import RUNNING
from kernels.step.seq_slot_tables import SeqSlotTables


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step for B rows with T tokens in total, padding included; of G groups of layers.

    A row is idle if its slot is -1, its sequence has ended, or the step asks for no tokens of it or
    for more than are known. Nothing is read or written for an idle row: its tokens are padding.

    Attributes:
        token_ids: int64 [T]; 0 for padding.
        positions: int64 [T], position of each token in its sequence, from 0; 0 for padding.
        slot_mapping: int64 [G * T], where its KV is written, for one group after the other: block
            id * block_size + offset; -1 for padding.
        seq_lens: int32 [B], tokens of the sequence including those of this step; 0 if idle.
        block_tables: int32 [B, G * max_blocks], block ids of each row's `seq_lens` tokens,
            for one group after the other. Later entries of each are ids of earlier steps, or 0.
        logits_rows: int64 [B], index of each row's last token; 0 if idle.
        sample_slots: int32 [B], the slot whose next token is sampled from the row's logits; -1 if
            the row is idle or its prefill is not complete.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    sample_slots: Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        num_tokens: int,
        *,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> StepInputs:
        """Allocate inputs for `num_rows` rows and `num_tokens` tokens; only block ids are valid."""
        return cls(
            token_ids=torch.empty(num_tokens, dtype=torch.int64, device=device),
            positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
            slot_mapping=torch.empty(num_groups * num_tokens, dtype=torch.int64, device=device),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(
                num_rows, num_groups * max_blocks, dtype=torch.int32, device=device
            ),
            logits_rows=torch.empty(num_rows, dtype=torch.int64, device=device),
            sample_slots=torch.empty(num_rows, dtype=torch.int32, device=device),
        )


def prepare_inputs(
    tables: SeqSlotTables,
    slots: Tensor,
    query_start_loc: Tensor,
    num_tokens_padded: int,
    block_size: int,
    *,
    out: StepInputs | None = None,
) -> StepInputs:
    """Return the inputs of a step; advance `num_computed_tokens` of its rows in `tables`.

    Row i computes the next `query_start_loc[i + 1] - query_start_loc[i]` tokens of `slots[i]`: a
    chunk of its prompt, or the token that was sampled last.

    Args:
        tables: slot tables of the running sequences.
        slots: int32 [B], each at most once; -1 for a padding row.
        query_start_loc: int32 [B + 1], ascending from 0, at most `num_tokens_padded`.
        num_tokens_padded: T.
        block_size: tokens in a KV block.
        out: written to and returned; allocated by default.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device, or a row of the block
            tables cannot hold max_model_len tokens.
    """
    _check(tables, slots, query_start_loc, num_tokens_padded, block_size)
    num_rows = slots.shape[0]
    if out is not None:
        _check_out(out, tables, slots, num_tokens_padded)
    if not device.runs_triton(slots):
        inputs = _on_cpu(tables, slots, query_start_loc, num_tokens_padded, block_size)
        if out is None:
            return inputs
        for field in fields(inputs):
            getattr(out, field.name).copy_(getattr(inputs, field.name))
        return out
    if out is None:
        out = StepInputs.allocate(
            num_rows,
            num_tokens_padded,
            max_blocks=tables.max_blocks,
            device=slots.device,
            num_groups=tables.num_groups,
        )
    _launch(tables, slots, query_start_loc, block_size, out)
    return out


def reference(
    tables: SeqSlotTables,
    slots: Tensor,
    query_start_loc: Tensor,
    num_tokens_padded: int,
    block_size: int,
) -> tuple[StepInputs, Tensor]:
    """Return the inputs and the advanced `num_computed_tokens`; other block table entries are 0."""
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    slot = slots.long().clamp(min=0)
    computed = tables.num_computed_tokens[slot].long()
    seq_lens = computed + ends - starts
    known = tables.num_tokens[slot]
    live = (slots >= 0) & (tables.finish_reasons[slot] == RUNNING)
    live &= (ends > starts) & (seq_lens <= known)

    token_idx = torch.arange(num_tokens_padded, device=slots.device)  # [T]
    row = torch.searchsorted(ends, token_idx, right=True)
    inside = row < len(slots)
    row = row.clamp(max=max(len(slots) - 1, 0))
    blocks = tables.block_tables.view(tables.num_slots, tables.num_groups, -1)
    if len(slots):
        inside &= live[row]
        position = torch.where(inside, computed[row] + token_idx - starts[row], 0)
        token_ids = torch.where(inside, tables.token_ids[slot[row], position].long(), 0)
        block = blocks[slot[row], :, position // block_size].long().t()  # [G, T]
    else:
        position = token_ids = torch.zeros_like(token_idx)
        block = position.expand(tables.num_groups, -1)

    num_blocks = torch.where(live, (seq_lens + block_size - 1) // block_size, 0)
    entry = torch.arange(tables.max_blocks, device=slots.device)
    owned = (entry < num_blocks[:, None]).repeat(1, tables.num_groups)  # [B, G * max_blocks]
    num_computed_tokens = tables.num_computed_tokens.clone()
    num_computed_tokens[slot[live]] = seq_lens[live].int()
    inputs = StepInputs(
        token_ids=token_ids,
        positions=position,
        slot_mapping=torch.where(inside, block * block_size + position % block_size, -1).flatten(),
        seq_lens=torch.where(live, seq_lens, 0).int(),
        block_tables=torch.where(owned, tables.block_tables[slot], 0),
        logits_rows=torch.where(live, ends - 1, 0),
        sample_slots=torch.where(live & (seq_lens == known), slots, -1),
    )
    return inputs, num_computed_tokens


def _on_cpu(
    tables: SeqSlotTables,
    slots: Tensor,
    query_start_loc: Tensor,
    num_tokens_padded: int,
    block_size: int,
) -> StepInputs:
    fast = cpu.operations(slots)
    if fast is None:
        inputs, num_computed_tokens = reference(
            tables, slots, query_start_loc, num_tokens_padded, block_size
        )
        tables.num_computed_tokens.copy_(num_computed_tokens)
        return inputs
    return StepInputs(
        *fast.prepare_inputs(
            tables.token_ids,
            tables.block_tables,
            tables.num_tokens,
            tables.num_computed_tokens,
            tables.finish_reasons,
            slots,
            query_start_loc,
            num_tokens_padded,
            block_size,
            tables.num_groups,
        )
    )


def _launch(
    tables: SeqSlotTables,
    slots: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    out: StepInputs,
) -> None:
    num_rows = slots.shape[0]
    prepare_inputs_kernel[(num_rows + 1,)](
        all_token_ids_ptr=tables.token_ids,
        all_block_tables_ptr=tables.block_tables,
        num_tokens_ptr=tables.num_tokens,
        num_computed_ptr=tables.num_computed_tokens,
        finish_reasons_ptr=tables.finish_reasons,
        slots_ptr=slots,
        query_start_loc_ptr=query_start_loc,
        token_ids_ptr=out.token_ids,
        positions_ptr=out.positions,
        slot_mapping_ptr=out.slot_mapping,
        seq_lens_ptr=out.seq_lens,
        block_tables_ptr=out.block_tables,
        logits_rows_ptr=out.logits_rows,
        sample_slots_ptr=out.sample_slots,
        max_model_len=tables.max_model_len,
        max_blocks=tables.max_blocks,
        num_rows=num_rows,
        num_tokens_padded=out.token_ids.shape[0],
        RUNNING=RUNNING,
        BLOCK_SIZE=block_size,
        GROUPS=tables.num_groups,
        **settings(),
    )


def _check(
    tables: SeqSlotTables,
    slots: Tensor,
    query_start_loc: Tensor,
    num_tokens_padded: int,
    block_size: int,
) -> None:
    check_shape("slots", slots, (None,))
    check_shape("query_start_loc", query_start_loc, (slots.shape[0] + 1,))
    for name, tensor in (("slots", slots), ("query_start_loc", query_start_loc)):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, tables.buffer.device)
        check_contiguous(name, tensor)
    if num_tokens_padded < 0:
        raise ValueError(f"num_tokens_padded: must not be negative (got {num_tokens_padded})")
    if block_size < 1:
        raise ValueError(f"block_size: must be positive (got {block_size})")
    max_blocks = tables.max_blocks
    if max_blocks * block_size < tables.max_model_len:
        raise ValueError(
            f"tables: {max_blocks} blocks of {block_size} tokens cannot hold max_model_len, "
            f"{tables.max_model_len}"
        )


def _check_out(
    out: StepInputs, tables: SeqSlotTables, slots: Tensor, num_tokens_padded: int
) -> None:
    rows, tokens = (slots.shape[0],), (num_tokens_padded,)
    table_width = tables.block_tables.shape[1]
    for name, tensor, shape, dtype in (
        ("token_ids", out.token_ids, tokens, torch.int64),
        ("positions", out.positions, tokens, torch.int64),
        ("slot_mapping", out.slot_mapping, (tables.num_groups * tokens[0],), torch.int64),
        ("seq_lens", out.seq_lens, rows, torch.int32),
        ("block_tables", out.block_tables, (*rows, table_width), torch.int32),
        ("logits_rows", out.logits_rows, rows, torch.int64),
        ("sample_slots", out.sample_slots, rows, torch.int32),
    ):
        check_output(f"out.{name}", tensor, shape, dtype, slots.device)


# Not specialised on these arguments: another batch size must not recompile.
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens_padded"],
    do_not_specialize_on_alignment=["slots_ptr", "query_start_loc_ptr"],
)
def prepare_inputs_kernel(
    all_token_ids_ptr,
    all_block_tables_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    finish_reasons_ptr,
    slots_ptr,
    query_start_loc_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    logits_rows_ptr,
    sample_slots_ptr,
    max_model_len,
    max_blocks,
    num_rows,
    num_tokens_padded,
    RUNNING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    is_row = i_row < num_rows  # the last program handles padding
    i_start = tl.load(query_start_loc_ptr + i_row)
    i_end = tl.load(query_start_loc_ptr + i_row + 1, mask=is_row, other=num_tokens_padded)
    i_end = tl.minimum(i_end, num_tokens_padded)
    i_slot = tl.load(slots_ptr + i_row, mask=is_row, other=-1).to(tl.int64)
    has_slot = i_slot >= 0
    num_computed = tl.load(num_computed_ptr + i_slot, mask=has_slot, other=0)
    num_known = tl.load(num_tokens_ptr + i_slot, mask=has_slot, other=0)
    reason = tl.load(finish_reasons_ptr + i_slot, mask=has_slot, other=RUNNING)
    seq_len = num_computed + i_end - i_start
    is_live = has_slot & (reason == RUNNING) & (i_end > i_start) & (seq_len <= num_known)

    p_tokens = all_token_ids_ptr + i_slot * max_model_len
    p_blocks = all_block_tables_ptr + i_slot * GROUPS * max_blocks
    i_live_end = tl.where(is_live, i_end, i_start)
    for i_token in range(i_start, i_end, BLOCK):
        o_token = i_token + tl.arange(0, BLOCK)
        m_token = o_token < i_end
        m_live = o_token < i_live_end
        o_position = num_computed + o_token - i_start
        b_token = tl.load(p_tokens + o_position, mask=m_live, other=0)  # [BLOCK]
        tl.store(token_ids_ptr + o_token, b_token.to(tl.int64), mask=m_token)
        b_position = tl.where(m_live, o_position, 0).to(tl.int64)
        tl.store(positions_ptr + o_token, b_position, mask=m_token)
        for i_group in tl.static_range(GROUPS):
            p_block = p_blocks + i_group * max_blocks + o_position // BLOCK_SIZE
            b_block = tl.load(p_block, mask=m_live, other=0)
            b_slot = b_block.to(tl.int64) * BLOCK_SIZE + o_position % BLOCK_SIZE
            p_slot = slot_mapping_ptr + i_group * num_tokens_padded + o_token
            tl.store(p_slot, tl.where(m_live, b_slot, -1), mask=m_token)

    seq_len = tl.where(is_live, seq_len, 0)
    num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    p_row_blocks = block_tables_ptr + i_row.to(tl.int64) * GROUPS * max_blocks
    for i_block in range(0, num_blocks, BLOCK):
        o_block = i_block + tl.arange(0, BLOCK)
        for i_group in tl.static_range(GROUPS):
            o_group = i_group * max_blocks + o_block
            b_block = tl.load(p_blocks + o_group, mask=o_block < num_blocks)
            tl.store(p_row_blocks + o_group, b_block, mask=o_block < num_blocks)

    tl.store(seq_lens_ptr + i_row, seq_len, mask=is_row)
    i_logits = tl.where(is_live, i_end - 1, 0).to(tl.int64)
    tl.store(logits_rows_ptr + i_row, i_logits, mask=is_row)
    i_sample = tl.where(is_live & (seq_len == num_known), i_slot, -1).to(tl.int32)
    tl.store(sample_slots_ptr + i_row, i_sample, mask=is_row)
    # One thread stores for the program; all threads must have read the counter before.
    tl.debug_barrier()
    tl.store(num_computed_ptr + i_slot, seq_len, mask=is_live)


def settings() -> dict[str, int]:
    """Return tile size and warps: a prefill chunk of 8192 tokens takes one program 8 iterations.

    That is small compared with such a step; nearly all rows are decodes with few blocks to copy.
    """
    return {"BLOCK": 1024, "num_warps": 4}
