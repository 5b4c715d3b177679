"""What steps do with the slot tables, whose latency counts, and copies of KV blocks.

Each step makes its inputs from the tables and writes its tokens there. Blocks are copied in all
layers, on the device and to the host, next to indexing in torch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.bench.kernels.case import SMALL, Case, Work, numel_bytes, randn
from engine.bench.kernels.shapes import LLAMA_8B, Shape
from kernels.block_copy import BlockCopier
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.step_inputs import StepInputs, prepare_inputs
from kernels.step.token_scatter import scatter_tokens

_BLOCK_SIZE = 16


def _tables(rows: int, length: int, known: int, device: torch.device) -> SeqSlotTables:
    """Return tables of `rows` running sequences with `known` of up to `length` tokens.

    Every step advances them; they have room for as many steps as are measured.
    """
    found = SeqSlotTables.allocate(
        rows,
        max_model_len=length,
        max_blocks=length // _BLOCK_SIZE,
        max_stop_token_ids=4,
        max_biases=1,
        vocab_size=1,
        device=device,
    )
    found.token_ids.copy_(torch.arange(length, device=device))
    found.block_tables.copy_(torch.randperm(rows * (length // _BLOCK_SIZE)).view(rows, -1))
    found.stop_token_ids.fill_(-1)
    found.num_tokens.fill_(known)
    found.num_prompt_tokens.fill_(1)
    found.max_tokens.fill_(length)
    return found


def _inputs(rows: int, known: int, length: int, device: torch.device) -> Work:
    found = _tables(rows, length, length, device)
    found.num_computed_tokens.fill_(known)
    slots = torch.randperm(rows).to(device, torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    max_blocks = found.block_tables.shape[1]
    out = StepInputs.allocate(rows, rows, max_blocks=max_blocks, device=device)
    block_ids = rows * (known // _BLOCK_SIZE + 1)
    return Work(
        ours=partial(prepare_inputs, found, slots, starts, rows, _BLOCK_SIZE, out=out),
        bytes=2 * 4 * block_ids + numel_bytes(out.token_ids, out.positions, out.slot_mapping),
        written=(found.num_computed_tokens,),
    )


def _scatter(rows: int, known: int, length: int, device: torch.device) -> Work:
    found = _tables(rows, length, known, device)
    slots = torch.randperm(rows).to(device, torch.int32)
    token_ids = torch.arange(1000, 1000 + rows, device=device)
    return Work(
        ours=partial(scatter_tokens, found, slots, token_ids),
        # Per row: 8 values read and written in the tables, and its stop tokens.
        bytes=4 * rows * (8 + found.stop_token_ids.shape[1]),
        written=(found.token_ids, found.num_tokens, found.finish_reasons),
    )


def _copy(
    blocks: int, to_host: bool, model: Shape, dtype: torch.dtype, device: torch.device
) -> Work:
    shape = (_BLOCK_SIZE, model.kv_heads, model.head_dim)
    caches = [
        randn(2 * blocks, *shape, dtype=dtype, device=device, seed=i)
        for i in range(2 * model.layers)
    ]
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(0))
    sources, destinations = order[:blocks], order[blocks:]
    written = caches
    if to_host:
        destinations = torch.arange(blocks)
        pinned = device.type == "cuda"
        written = [torch.zeros(blocks, *shape, dtype=dtype, pin_memory=pinned) for _ in caches]
    copier = BlockCopier(caches, written if to_host else ())
    ours = copier.swap_out if to_host else copier.copy
    return Work(
        ours=partial(ours, sources.tolist(), destinations.tolist()),
        peers={"index_select": partial(_torch, caches, written, sources, destinations)},
        bytes=numel_bytes(*written),  # on the device half is read, half written
        written=tuple(written),
        graph=False,  # block ids come from the host, whose time counts
    )


def _torch(
    read: list[Tensor], written: list[Tensor], sources: Tensor, destinations: Tensor
) -> None:
    sources = sources.to(read[0].device, non_blocking=True)
    destinations = destinations.to(written[0].device, non_blocking=True)
    for source, destination in zip(read, written, strict=True):
        chosen = source.index_select(0, sources)
        if chosen.device == destination.device:
            destination.index_copy_(0, destinations, chosen)
        else:
            destination.copy_(chosen, non_blocking=True)


CASES = [
    Case(
        operation=operation,
        name=f"{rows} x 1k",
        build=build,
        shape={"rows": rows, "known": 1024, "length": 8192},
        tiny={"rows": 5, "known": 21, "length": 64},
    )
    for operation, build in (("step_inputs", _inputs), ("token_scatter", _scatter))
    for rows in (256, 64, 1)
]
CASES += [
    Case(
        operation="block_copy",
        name=f"{'swap out' if to_host else 'copy'} {LLAMA_8B.label} {blocks} blocks",
        build=_copy,
        shape={"blocks": blocks, "to_host": to_host, "model": LLAMA_8B, "dtype": torch.bfloat16},
        tiny={"blocks": 3, "model": SMALL, "dtype": torch.float32},
    )
    for blocks, to_host in ((512, False), (1, False), (64, True))
]
