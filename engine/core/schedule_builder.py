"""Builders of a `SchedulerOutput`, from the requests that take part in a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.sampling_constraints import device_forbids_stops
from engine.core.kv.kv_cache_manager import BlockCopy
from engine.core.kv.state_manager import StateManager
from engine.core.kv.state_saves import MOST_SAVES
from engine.core.ragged import Int32s, ragged
from engine.core.request import Request
from engine.core.schedule import (
    MAX_STOP_TOKEN_IDS,
    BlockWrites,
    NewRequestData,
    SchedulerOutput,
    StateBlocks,
)
from engine.core.seq_slots import SeqSlots
from engine.request.sampling_params import SamplingParams
from kernels.step.sampling_columns import (
    ALLOWED,
    BEAM,
    BIAS,
    DRAW_FEATURES,
    LOGPROBS,
    MIN_TOKENS,
    NORMAL,
    SAMPLING_COLUMNS,
)

_settings_of = attrgetter(*SAMPLING_COLUMNS)
_OFF = np.array([column.off for column in SAMPLING_COLUMNS.values()])
_FEATURES = np.array([column.feature for column in SAMPLING_COLUMNS.values()], dtype=np.int32)
_LEAST, _MOST = np.array([column.bounds for column in SAMPLING_COLUMNS.values()]).T

# A slot, a group of layers, an entry of its block table, and the blocks from there on.
BlockWrite = tuple[int, int, int, Sequence[int]]
_Bound = float | NDArray[np.float64]


class NewRequestDataBuilder:
    """Collects the sequences that get a slot in a step."""

    def __init__(self) -> None:
        """Start empty."""
        self._requests: list[Request] = []
        self._slots: list[int] = []
        self._starts: list[int] = []

    def add(self, request: Request, slot: int, num_computed_tokens: int) -> None:
        """Give `slot` to `request`, all of whose tokens the host has read."""
        self._requests.append(request)
        self._slots.append(slot)
        self._starts.append(num_computed_tokens)

    def build(self) -> NewRequestData:
        """Return the columns of the sequences, which are not changed any more."""
        return self._columns() if self._requests else NO_NEW_REQUESTS

    def _columns(self) -> NewRequestData:
        requests = self._requests
        params = [request.sampling_params for request in requests]
        stop_ids = [_padded_stop_ids(request) for request in requests]
        bias = [sorted((p.logit_bias or {}).items()) for p in params]
        biases = np.array([value for _, value in chain.from_iterable(bias)], dtype=np.float64)
        columns, features = _sampling_columns(params)
        return NewRequestData(
            slots=_int32(self._slots),
            token_ids=ragged([request.token_ids for request in requests]),
            num_prompt_tokens=_int32([request.num_prompt_tokens for request in requests]),
            num_computed_tokens=_int32(self._starts),
            min_tokens=_int32([p.min_tokens for p in params]),
            max_tokens=_int32([request.max_tokens for request in requests]),
            stop_token_ids=_int32(stop_ids).reshape(-1, MAX_STOP_TOKEN_IDS),
            features=features | _int32([_features(request) for request in requests]),
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            num_top_logprobs=_int32([request.num_top_logprobs or 0 for request in requests]),
            bias_token_ids=ragged([[token for token, _ in entries] for entries in bias]),
            bias_values=_bounded(biases, *NORMAL).astype(np.float32),
            allowed_token_ids=ragged([p.allowed_token_ids or () for p in params]),
            **columns,
        )


class ScheduleBuilder:
    """Collects the rows and block moves of a step.

    Requests admitted in the same step can share the blocks that it fills: in every layer, the KV of
    all tokens of a step is written before any is read.

    Attributes:
        num_tokens: of all rows.
        new_requests: sequences that get a slot.
        block_writes: changes of block tables, by slot and group.
        swap_out, copies, swap_in: blocks to move before the step.
        state_saves: of slots whose rows write checkpoints, their positions and blocks.
        chunks: of slots that compute several known tokens, where these begin and end; of a model
            whose layers keep states.
    """

    def __init__(self, states: SeqSlots, *, keeps_states: bool = False) -> None:
        """Start a step of the sequences in `states`, of a model whose layers may keep states."""
        self._states = states
        self._keeps_states = keeps_states
        # The first columns of `SchedulerOutput`, in parts.
        self._rows: list[tuple[NDArray[Any], ...]] = []
        self.num_tokens = 0
        self.new_requests = NewRequestDataBuilder()
        self.block_writes: dict[tuple[int, int], BlockWrite] = {}
        self.swap_out: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.state_saves: dict[int, list[tuple[int, int]]] = {}
        self.chunks: dict[int, tuple[int, int]] = {}

    def admit(self, request: Request, num_tokens: int) -> None:
        """Add the next tokens of `request`, which has got a slot, with all that is known of it."""
        assert request.slot is not None
        self.rewrite(request)
        self.add(_int32([request.slot]), _int32([num_tokens]))

    def rewrite(self, request: Request) -> None:
        """Replace all that the device knows of a running `request`, which has a row in the step."""
        assert request.slot is not None
        self.new_requests.add(request, request.slot, request.num_computed_tokens)
        self.write_blocks(request)

    def write_blocks(self, request: Request, starts: Sequence[int] | None = None) -> None:
        """Write the block tables of `request` to its slot, from these entries on, or all."""
        slot = request.slot
        assert slot is not None
        for group, table in enumerate(request.kv.tables):
            start = starts[group] if starts else 0
            if start < len(table):
                self.block_writes[slot, group] = slot, group, start, table[start:]

    def add(self, slots: Int32s, num_tokens: Int32s, num_drafts: Int32s | int = 0) -> None:
        """Add the next tokens of sequences, [N] each, and count them as computed.

        Of these the last `num_drafts` are drafts; a token is drawn behind each of them too.
        """
        states = self._states
        ends = states.num_computed_tokens[slots] + num_tokens
        states.num_computed_tokens[slots] = ends
        ends = ends - num_drafts  # of what is known
        num_unread = states.num_unread_tokens[slots]
        wants_token = ends == states.num_tokens[slots] + num_unread
        states.num_unread_tokens[slots] = num_unread + wants_token + num_drafts
        num_output_tokens = ends - states.num_prompt_tokens[slots]
        columns = slots, num_tokens, wants_token, num_output_tokens
        self._rows.append((*columns, *self._advance_states(slots, ends, num_tokens - num_drafts)))
        self.num_tokens += int(num_tokens.sum())

    def _advance_states(
        self, slots: Int32s, ends: Int32s, num_known: Int32s
    ) -> tuple[NDArray[Any], ...]:
        """Return `done` and `kept` of `StateBlocks`, of rows that take their states to `ends`."""
        if not self._keeps_states:
            return ()
        done = self._states.num_state_tokens[slots]
        self._states.num_state_tokens[slots] = ends
        for row in (num_known > 1).nonzero()[0].tolist():
            self.chunks[int(slots[row])] = int(done[row]), int(ends[row])
        return done, num_known

    def add_save(self, request: Request, position: int, states: StateManager) -> bool:
        """Let the row of a request write a checkpoint, if it passes the position; return whether.

        Others have shown to share what is before it.
        """
        slot = request.slot
        assert slot is not None
        start, end = self.chunks.get(slot, (0, 0))
        saves = self.state_saves.get(slot, [])
        if not start < position <= end or len(saves) == MOST_SAVES:
            return False
        request.kv.wanted.add(position)
        found = states.save_at(request, [position])
        self.state_saves[slot] = saves + found
        return bool(found)

    def build(self) -> SchedulerOutput:
        """Return the step; rows must have been added."""
        columns: Sequence[NDArray[Any]] = self._rows[0]
        if len(self._rows) > 1:
            columns = [np.concatenate(parts) for parts in zip(*self._rows, strict=True)]
        slots, num_tokens, wants_token, num_output_tokens, *states = columns
        num_decodes = len(slots)
        if self.num_tokens > num_decodes or np.count_nonzero(wants_token) < num_decodes:
            order = np.argsort(2 * (num_tokens > 1) + ~wants_token, kind="stable")
            slots, num_tokens, wants_token, num_output_tokens, *states = (
                each[order] for each in columns
            )
            num_decodes = int(np.searchsorted(num_tokens, 2))
        return SchedulerOutput(
            slots,
            num_tokens,
            wants_token,
            num_output_tokens,
            num_decodes=num_decodes,
            new_requests=self.new_requests.build(),
            block_writes=block_writes([*self.block_writes.values()]),
            swap_out=_block_pairs(self.swap_out),
            copies=_block_pairs(self.copies),
            swap_in=_block_pairs(self.swap_in),
            states=self._state_blocks(slots, *states) if self._keeps_states else None,
        )

    def _state_blocks(self, slots: Int32s, done: Int32s, kept: Int32s) -> StateBlocks:
        """Return the states that the rows read and write; the next step reads what they write."""
        columns = self._states
        reads, writes = columns.state_reads[slots], columns.state_writes[slots]
        columns.state_reads[slots] = writes
        saves = np.full((len(slots), MOST_SAVES, 2), -1, dtype=np.int32)
        rows = {slot: row for row, slot in enumerate(slots.tolist())} if self.state_saves else {}
        for slot, found in self.state_saves.items():
            if found:
                saves[rows[slot], : len(found)] = found
        return StateBlocks(reads, writes, saves, done, kept)


def block_writes(writes: Sequence[BlockWrite]) -> BlockWrites:
    """Return changes of block tables as arrays."""
    if not writes:
        return NO_BLOCK_WRITES
    slots, groups, starts, block_ids = zip(*writes, strict=True)
    return BlockWrites(_int32(slots), _int32(groups), _int32(starts), ragged(block_ids))


def _block_pairs(copies: Sequence[BlockCopy]) -> Int32s:
    """Return `copies` as an array [N, 2]."""
    return _int32(copies) if copies else _NO_BLOCK_PAIRS


def _int32(values: Sequence[object] | Int32s) -> Int32s:
    return np.array(values, dtype=np.int32)


def _bounded(values: NDArray[np.float64], least: _Bound, most: _Bound) -> NDArray[np.float64]:
    """Return `values` with their magnitudes from `least` to `most`, but 0 as it is."""
    sizes = np.abs(values).clip(least, most)
    return np.where(values == 0, 0, np.copysign(sizes, values))


def _sampling_columns(params: Sequence[SamplingParams]) -> tuple[dict[str, NDArray[Any]], Int32s]:
    """Return the sampling columns of A sequences by name, and the feature bits of these [A]."""
    settings = np.array([_settings_of(each) for each in params], dtype=np.float64)
    settings = settings.reshape(len(params), len(SAMPLING_COLUMNS))  # [A, columns]
    bounded = _bounded(settings, _LEAST, _MOST)
    columns = {
        name: values.astype(column.dtype)
        for (name, column), values in zip(SAMPLING_COLUMNS.items(), bounded.T, strict=True)
    }
    features = np.bitwise_or.reduce(np.where(settings == _OFF, 0, _FEATURES), axis=1)
    return columns, np.where(columns["temperature"] == 0, features & ~DRAW_FEATURES, features)


def _features(request: Request) -> int:
    """Return the feature bits of `request` beside those of its sampling columns."""
    p = request.sampling_params
    return (
        ALLOWED * (p.allowed_token_ids is not None)
        | BIAS * bool(p.logit_bias)
        | MIN_TOKENS * device_forbids_stops(request)
        | LOGPROBS * (request.num_top_logprobs is not None)
        | BEAM * request.is_beam
    )


def _padded_stop_ids(request: Request) -> list[int]:
    first = sorted(request.stop_token_ids)[:MAX_STOP_TOKEN_IDS]
    return first + [-1] * (MAX_STOP_TOKEN_IDS - len(first))


NO_NEW_REQUESTS = NewRequestDataBuilder()._columns()
_NO_BLOCK_PAIRS = np.zeros((0, 2), dtype=np.int32)
NO_BLOCK_WRITES = BlockWrites(_int32([]), _int32([]), _int32([]), ragged([]))
