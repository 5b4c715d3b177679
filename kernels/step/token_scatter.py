"""Appends sampled tokens to their sequences, and ends sequences that meet a stop condition.

The rules are the engine's (`Request.append`), except stop strings, which only the host can find.
One program processes a tile of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, device
from kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_output,
    check_shape,
)
from kernels.device import cdiv, next_power_of_2
from kernels.step.sampling_columns import LENGTH, RUNNING, SKIPPED, STOP
from kernels.step.seq_slot_tables import SeqSlotTables


def scatter_tokens(
    tables: SeqSlotTables, slots: Tensor, token_ids: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Append `token_ids[i]` to the sequence in `slots[i]`, unless that is -1 or has ended.

    A sequence ends at a stop token if it then has more than `min_tokens` output tokens, and when it
    reaches `max_tokens` or max_model_len. The next `prepare_inputs` treats it as idle.

    Args:
        tables: changed in place: `token_ids`, `num_tokens`, `finish_reasons`.
        slots: int32 [R], each at most once: `StepInputs.sample_slots` or its first rows.
        token_ids: int64 [R].
        out: int32 [R], written to and returned; allocated by default.

    Returns:
        int32 [R]: SKIPPED, or the sequence's finish reason: RUNNING, STOP or LENGTH.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_shape("slots", slots, (None,))
    check_dtype("slots", slots, torch.int32)
    check_shape("token_ids", token_ids, tuple(slots.shape))
    check_dtype("token_ids", token_ids, torch.int64)
    for name, tensor in (("slots", slots), ("token_ids", token_ids)):
        check_device(name, tensor, tables.buffer.device)
        check_contiguous(name, tensor)
    if out is not None:
        check_output("out", out, tuple(slots.shape), torch.int32, slots.device)
    if not device.runs_triton(slots):
        found = _on_cpu(tables, slots, token_ids)
        return found if out is None else out.copy_(found)
    out = torch.empty_like(slots) if out is None else out
    if slots.shape[0]:
        _launch(tables, slots, token_ids, out)
    return out


def reference(
    tables: SeqSlotTables, slots: Tensor, token_ids: Tensor
) -> tuple[SeqSlotTables, Tensor]:
    """Return the changed tables and the finish reasons."""
    tables = tables.clone()
    return tables, _torch(tables, slots, token_ids)


def _on_cpu(tables: SeqSlotTables, slots: Tensor, token_ids: Tensor) -> Tensor:
    if (fast := cpu.operations(slots)) is None:
        return _torch(tables, slots, token_ids)
    found: Tensor = fast.scatter_tokens(
        tables.token_ids,
        tables.stop_token_ids,
        tables.num_tokens,
        tables.num_prompt_tokens,
        tables.min_tokens,
        tables.max_tokens,
        tables.finish_reasons,
        slots,
        token_ids,
    )
    return found


def _torch(tables: SeqSlotTables, slots: Tensor, token_ids: Tensor) -> Tensor:
    slot = slots.long().clamp(min=0)
    position = tables.num_tokens[slot]
    takes = (slots >= 0) & (tables.finish_reasons[slot] == RUNNING)
    takes &= position < tables.max_model_len
    num_outputs = position + 1 - tables.num_prompt_tokens[slot]
    stops = (tables.stop_token_ids[slot] == token_ids[:, None]).any(-1)
    stops &= num_outputs > tables.min_tokens[slot]
    ends = (num_outputs >= tables.max_tokens[slot]) | (position + 1 == tables.max_model_len)
    reasons = torch.where(ends, LENGTH, RUNNING)
    reasons = torch.where(stops, STOP, reasons)
    reasons = torch.where(takes, reasons, SKIPPED).int()

    slot = slot[takes]
    tables.token_ids[slot, position[takes].long()] = token_ids[takes].int()
    tables.num_tokens[slot] = position[takes] + 1
    tables.finish_reasons[slot] = reasons[takes]
    return reasons


# Not specialised on these arguments: another batch size must not recompile.
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "token_ids_ptr"]
)
def _kernel(
    all_token_ids_ptr,
    stop_token_ids_ptr,
    num_tokens_ptr,
    num_prompt_tokens_ptr,
    min_tokens_ptr,
    max_tokens_ptr,
    finish_reasons_ptr,
    slots_ptr,
    token_ids_ptr,
    reasons_ptr,
    max_model_len,
    num_stop_token_ids,
    num_rows,
    SKIPPED: tl.constexpr,
    RUNNING: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
):
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    b_slot = tl.load(slots_ptr + o_row, mask=m_row, other=-1).to(tl.int64)  # [BR]
    b_token = tl.load(token_ids_ptr + o_row, mask=m_row, other=0).to(tl.int32)
    m_slot = b_slot >= 0
    b_position = tl.load(num_tokens_ptr + b_slot, mask=m_slot, other=0)
    b_reason = tl.load(finish_reasons_ptr + b_slot, mask=m_slot, other=RUNNING)
    m_takes = m_slot & (b_reason == RUNNING) & (b_position < max_model_len)

    o_stop = tl.arange(0, BE)
    m_stop = m_takes[:, None] & (o_stop < num_stop_token_ids)[None, :]
    p_stop = stop_token_ids_ptr + b_slot[:, None] * num_stop_token_ids + o_stop[None, :]
    b_stop = tl.load(p_stop, mask=m_stop, other=-1)  # [BR, BE]
    m_stops = tl.max((m_stop & (b_stop == b_token[:, None])).to(tl.int32), axis=1) > 0

    b_prompt = tl.load(num_prompt_tokens_ptr + b_slot, mask=m_takes, other=0)
    b_min = tl.load(min_tokens_ptr + b_slot, mask=m_takes, other=0)
    b_max = tl.load(max_tokens_ptr + b_slot, mask=m_takes, other=0)
    b_outputs = b_position + 1 - b_prompt
    m_stops = m_stops & (b_outputs > b_min)
    m_ends = (b_outputs >= b_max) | (b_position + 1 == max_model_len)
    b_reason = tl.where(m_stops, STOP, tl.where(m_ends, LENGTH, RUNNING))

    # If a tile is smaller than the program, several threads read what one of them stores.
    tl.debug_barrier()
    tl.store(all_token_ids_ptr + b_slot * max_model_len + b_position, b_token, mask=m_takes)
    tl.store(num_tokens_ptr + b_slot, b_position + 1, mask=m_takes)
    tl.store(finish_reasons_ptr + b_slot, b_reason, mask=m_takes)
    tl.store(reasons_ptr + o_row, tl.where(m_takes, b_reason, SKIPPED), mask=m_row)


def settings(num_stop_token_ids: int) -> dict[str, int]:
    """Return tile size and warps: about 1024 stop tokens in registers at once, 8 per thread."""
    width = next_power_of_2(num_stop_token_ids)
    return {"BR": min(max(1024 // width, 1), 128), "BE": width, "num_warps": 4}


def _launch(tables: SeqSlotTables, slots: Tensor, token_ids: Tensor, reasons: Tensor) -> None:
    num_rows, num_stop_token_ids = slots.shape[0], tables.stop_token_ids.shape[1]
    tile = settings(num_stop_token_ids)
    _kernel[(cdiv(num_rows, tile["BR"]),)](
        all_token_ids_ptr=tables.token_ids,
        stop_token_ids_ptr=tables.stop_token_ids,
        num_tokens_ptr=tables.num_tokens,
        num_prompt_tokens_ptr=tables.num_prompt_tokens,
        min_tokens_ptr=tables.min_tokens,
        max_tokens_ptr=tables.max_tokens,
        finish_reasons_ptr=tables.finish_reasons,
        slots_ptr=slots,
        token_ids_ptr=token_ids,
        reasons_ptr=reasons,
        max_model_len=tables.max_model_len,
        num_stop_token_ids=num_stop_token_ids,
        num_rows=num_rows,
        SKIPPED=SKIPPED,
        RUNNING=RUNNING,
        STOP=STOP,
        LENGTH=LENGTH,
        **tile,
    )
