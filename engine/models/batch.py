"""Batch: the tensors of one forward pass, built once, immutable, passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over B sequences with T tokens in all, decode and prefill mixed.

    Sequence i owns tokens `query_start_loc[i]:query_start_loc[i + 1]`. They are the last ones of
    its `seq_lens[i]` tokens; the KV of those before them is in the cache already. Sequences with
    one token come first. Idle rows and the tokens after the last row are padding. All tensors are
    on the model's device.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], place of each token in its sequence, from 0.
        slot_mapping: int64 [T], where its KV goes: block id * block_size + offset; -1: nowhere.
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B], tokens of the sequence with those of this step; 0: an idle row.
        block_tables: int32 [B, max blocks]; undefined after the blocks of a sequence.
        num_decodes: leading rows with one token; None: only the device knows.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    num_decodes: int | None
