"""Builders of a `Schedule`, from the requests that take part in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.sampling_constraints import device_forbids_stops
from engine.core.kv.kv_cache_manager import BlockCopy
from engine.core.ragged import Int32s, ragged
from engine.core.request import Request
from engine.core.schedule import (
    ALLOWED,
    BEAM,
    BIAS,
    FILTERS,
    LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MIN_TOKENS,
    PENALTIES,
    TRUNCATION,
    Admissions,
    BlockWrites,
    Schedule,
)
from engine.core.slot_states import SlotStates

# Least and most of numbers in float32, which would be 0 and infinity beyond: these forbid tokens.
_NORMAL = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_TEMPERATURES = 1e-37, 1e37
_FACTORS = 1e-30, 1e30  # of logits, the products of which are numbers, too

# A slot, a group of layers, an entry of its block table, and the blocks from there on.
BlockWrite = tuple[int, int, int, Sequence[int]]


class AdmissionsBuilder:
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

    def build(self) -> Admissions:
        """Return the columns of the sequences, which are not changed any more."""
        return self._columns() if self._requests else _NO_ADMISSIONS

    def _columns(self) -> Admissions:
        requests = self._requests
        params = [request.sampling_params for request in requests]
        stop_ids = [_padded_stop_ids(request) for request in requests]
        bias = [sorted((p.logit_bias or {}).items()) for p in params]
        return Admissions(
            slots=_int32(self._slots),
            token_ids=ragged([request.token_ids for request in requests]),
            num_prompt_tokens=_int32([request.num_prompt_tokens for request in requests]),
            num_computed_tokens=_int32(self._starts),
            min_tokens=_int32([p.min_tokens for p in params]),
            max_tokens=_int32([request.max_tokens for request in requests]),
            stop_token_ids=_int32(stop_ids).reshape(-1, MAX_STOP_TOKEN_IDS),
            features=_int32([_features(request) for request in requests]),
            seeds=np.array([request.seed for request in requests], dtype=np.uint64),
            temperature=_float32((p.temperature for p in params), _TEMPERATURES),
            top_k=_int32([p.top_k for p in params]),
            top_p=_float32(p.top_p for p in params),
            min_p=_float32(p.min_p for p in params),
            top_n_sigma=_float32(p.top_n_sigma for p in params),
            typical_p=_float32(p.typical_p for p in params),
            repetition_penalty=_float32((p.repetition_penalty for p in params), _FACTORS),
            presence_penalty=_float32(p.presence_penalty for p in params),
            frequency_penalty=_float32(p.frequency_penalty for p in params),
            num_top_logprobs=_int32([request.num_top_logprobs or 0 for request in requests]),
            bias_token_ids=ragged([[token for token, _ in entries] for entries in bias]),
            bias_values=_float32(value for _, value in chain.from_iterable(bias)),
            allowed_token_ids=ragged([p.allowed_token_ids or () for p in params]),
        )


class ScheduleBuilder:
    """Collects the rows and block moves of a step.

    Requests admitted in the same step can share the blocks that it fills: in every layer, the KV of
    all tokens of a step is written before any is read.

    Attributes:
        num_tokens: of all rows.
        admissions: sequences that get a slot.
        block_writes: changes of block tables, by slot and group.
        swap_out, copies, swap_in: blocks to move before the step.
    """

    def __init__(self, states: SlotStates) -> None:
        """Start a step of the sequences in `states`."""
        self._states = states
        # The first columns of `Schedule`, in parts.
        self._rows: list[tuple[Int32s, Int32s, NDArray[np.bool_], Int32s]] = []
        self.num_tokens = 0
        self.admissions = AdmissionsBuilder()
        self.block_writes: dict[tuple[int, int], BlockWrite] = {}
        self.swap_out: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []

    def admit(self, request: Request, num_tokens: int) -> None:
        """Add the next tokens of `request`, which has got a slot, with all that is known of it."""
        assert request.slot is not None
        self.rewrite(request)
        self.add(_int32([request.slot]), _int32([num_tokens]))

    def rewrite(self, request: Request) -> None:
        """Replace all that the device knows of a running `request`, which has a row in the step."""
        assert request.slot is not None
        self.admissions.add(request, request.slot, request.num_computed_tokens)
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
        self._rows.append((slots, num_tokens, wants_token, num_output_tokens))
        self.num_tokens += int(num_tokens.sum())

    def build(self) -> Schedule:
        """Return the step, its rows in the order of `Schedule`; rows must have been added."""
        columns: Sequence[NDArray[Any]] = self._rows[0]
        if len(self._rows) > 1:
            columns = [np.concatenate(parts) for parts in zip(*self._rows, strict=True)]
        slots, num_tokens, wants_token, num_output_tokens = columns
        num_decodes = len(slots)
        if self.num_tokens > num_decodes or np.count_nonzero(wants_token) < num_decodes:
            order = np.argsort(2 * (num_tokens > 1) + ~wants_token, kind="stable")
            slots, num_tokens, wants_token, num_output_tokens = (each[order] for each in columns)
            num_decodes = int(np.searchsorted(num_tokens, 2))
        return Schedule(
            slots,
            num_tokens,
            wants_token,
            num_output_tokens,
            num_decodes=num_decodes,
            admissions=self.admissions.build(),
            block_writes=block_writes([*self.block_writes.values()]),
            swap_out=_block_pairs(self.swap_out),
            copies=_block_pairs(self.copies),
            swap_in=_block_pairs(self.swap_in),
        )


def block_writes(writes: Sequence[BlockWrite]) -> BlockWrites:
    """Return changes of block tables as arrays."""
    if not writes:
        return _NO_BLOCK_WRITES
    slots, groups, starts, block_ids = zip(*writes, strict=True)
    return BlockWrites(_int32(slots), _int32(groups), _int32(starts), ragged(block_ids))


def _block_pairs(copies: Sequence[BlockCopy]) -> Int32s:
    """Return `copies` as an array [N, 2]."""
    return _int32(copies) if copies else _NO_BLOCK_PAIRS


def _int32(values: Sequence[object] | Int32s) -> Int32s:
    return np.array(values, dtype=np.int32)


def _float32(values: Iterable[float], bounds: tuple[float, float] = _NORMAL) -> NDArray[np.float32]:
    """Return `values` with their sizes within `bounds`, but 0 as it is."""
    wide = np.array(list(values), dtype=np.float64)
    sizes = np.abs(wide).clip(*bounds)
    return np.where(wide == 0, 0, np.copysign(sizes, wide)).astype(np.float32)


def _features(request: Request) -> int:
    """Return the bits of `Admissions.features`."""
    p = request.sampling_params
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    is_filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
    is_truncated = p.top_n_sigma > 0 or p.typical_p < 1
    return (
        ALLOWED * (p.allowed_token_ids is not None)
        | BIAS * bool(p.logit_bias)
        | PENALTIES * (penalties != (1, 0, 0))
        | MIN_TOKENS * device_forbids_stops(request)
        | FILTERS * (is_filtered and p.temperature > 0)
        | LOGPROBS * (request.num_top_logprobs is not None)
        | TRUNCATION * (is_truncated and p.temperature > 0)
        | BEAM * request.is_beam
    )


def _padded_stop_ids(request: Request) -> list[int]:
    first = sorted(request.stop_token_ids)[:MAX_STOP_TOKEN_IDS]
    return first + [-1] * (MAX_STOP_TOKEN_IDS - len(first))


_NO_ADMISSIONS = AdmissionsBuilder()._columns()
_NO_BLOCK_PAIRS = np.zeros((0, 2), dtype=np.int32)
_NO_BLOCK_WRITES = BlockWrites(_int32([]), _int32([]), _int32([]), ragged([]))
