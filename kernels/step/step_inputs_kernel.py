"""The kernel of `prepare_inputs`: one program per row, and one more for the padding tokens."""

from __future__ import annotations

import triton
import triton.language as tl


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
            b_place = b_block.to(tl.int64) * BLOCK_SIZE + o_position % BLOCK_SIZE
            p_place = slot_mapping_ptr + i_group * num_tokens_padded + o_token
            tl.store(p_place, tl.where(m_live, b_place, -1), mask=m_token)

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
