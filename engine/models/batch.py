"""Batch: the tensors of one forward pass, built once, immutable, passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.state.states import StepStates


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over B sequences with T tokens in all, decode and prefill mixed.

    The layers are in G groups, each of which has block tables of its own.

    Sequence i owns tokens `query_start_loc[i]:query_start_loc[i + 1]`. They are the last ones of
    its `seq_lens[i]` tokens; the KV of those before them is in the cache already. Sequences with
    one token come first. Idle rows and the tokens after the last row are padding. All tensors are
    on the model's device.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], of each token in its sequence, from 0.
        slot_mapping: int64 [G * T], where its KV goes in each group: block id * block_size +
            offset; -1: nowhere.
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B], tokens of the sequence with those of this step; 0: an idle row.
        block_tables: int32 [B, G * max blocks], side by side; undefined after the blocks of a
            sequence, and where a group has given them back.
        num_decodes: leading rows with one token; None: only the device knows.
        states: of the layers that keep states; None: the model has none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    num_decodes: int | None
    num_groups: int = 1
    states: StepStates | None = None

    def group_slot_mapping(self, group: int) -> Tensor:
        """Return the slot mapping of a group of layers, [T]."""
        num_tokens = self.token_ids.shape[0]
        return self.slot_mapping[group * num_tokens : (group + 1) * num_tokens]

    def group_tables(self, group: int) -> Tensor:
        """Return the block tables of a group, [B, max blocks], rows contiguous."""
        width = self.block_tables.shape[1] // self.num_groups
        return self.block_tables[:, group * width : (group + 1) * width]
