"""What rank 0 and the other ranks send each other, over a `Channel`.

Of a step only its arrays travel, as bytes: never objects, and never what is drawn from.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.ragged import Ragged
from engine.core.schedule import (
    MAX_STOP_TOKEN_IDS,
    BlockWrites,
    ForcedTokens,
    NewRequestData,
    SchedulerOutput,
)
from engine.core.schedule_builder import NO_BLOCK_WRITES, NO_NEW_REQUESTS
from engine.core.spec_decode.draft_tokens import DraftTokens
from engine.errors import ErrorReport
from kernels.step.sampling_columns import SAMPLING_COLUMNS

Lists = tuple[bytes, bytes]  # int32 start_loc and values of a `Ragged`


class LoadPart(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Load a part of the model, with these settings."""

    config: dict[str, Any]


class Loaded(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The rank has its part, and waits for steps.

    Attributes:
        description: what it has, for the log.
        device: on which it is, and how much of it.
    """

    description: str
    device: str


class Failed(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The rank could not load its part, or run a step; it ends."""

    error: ErrorReport


class Alive(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The rank is alive; sent every `ALIVE_INTERVAL_S`.

    Attributes:
        wait_s: how long it has waited for other ranks within steps, since it started.
    """

    wait_s: float


class Step(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A `SchedulerOutput`; arrays are bytes, in the order of its attributes.

    Attributes:
        rows: slots, num_tokens, wants_token and num_output_tokens.
        blocks: swap_out, copies and swap_in.
        new_requests, block_writes, scored, forced, drafts: their arrays; None: there are none.
        num_top: of `scored`.
    """

    rows: tuple[bytes, bytes, bytes, bytes]
    num_decodes: int
    blocks: tuple[bytes, bytes, bytes]
    new_requests: list[bytes] | None = None
    block_writes: tuple[bytes, bytes, bytes, bytes, bytes] | None = None
    scored: tuple[bytes, bytes] | None = None
    num_top: int = 0
    forced: tuple[bytes, bytes, bytes, bytes] | None = None
    embedded: bytes | None = None
    drafts: tuple[bytes, bytes, bytes, bytes] | None = None


ToRank = LoadPart | Step
FromRank = Loaded | Failed | Alive

ALIVE_INTERVAL_S = 0.5

_INT32 = np.dtype(np.int32)
_OTHER_TYPES: dict[str, np.dtype[Any] | None] = {
    "seeds": np.dtype(np.uint64),
    "bias_values": np.dtype(np.float32),
    **{name: np.dtype(column.dtype) for name, column in SAMPLING_COLUMNS.items()},
    **dict.fromkeys(("token_ids", "bias_token_ids", "allowed_token_ids")),
}
# Attributes of `NewRequestData` in their order; None: a `Ragged`, of two arrays.
_NEW_REQUESTS = {
    field.name: _OTHER_TYPES.get(field.name, _INT32) for field in fields(NewRequestData)
}


def encode_step(step: SchedulerOutput) -> Step:
    """Return `step` as it travels."""
    writes, scored, forced, drafts = step.block_writes, step.scored, step.forced, step.drafts
    return Step(
        (
            step.slots.tobytes(),
            step.num_tokens.tobytes(),
            step.wants_token.tobytes(),
            step.num_output_tokens.tobytes(),
        ),
        step.num_decodes,
        (step.swap_out.tobytes(), step.copies.tobytes(), step.swap_in.tobytes()),
        _encode_new(step.new_requests) if len(step.new_requests.slots) else None,
        None
        if not len(writes.slots)
        else (
            writes.slots.tobytes(),
            writes.groups.tobytes(),
            writes.starts.tobytes(),
            *_lists(writes.block_ids),
        ),
        None if scored is None else (scored.logits_indices.tobytes(), scored.token_ids.tobytes()),
        0 if scored is None else scored.num_top,
        None
        if forced is None
        else (forced.slots.tobytes(), forced.starts.tobytes(), *_lists(forced.token_ids)),
        None if step.embedded is None else step.embedded.tobytes(),
        None
        if drafts is None
        else (drafts.rows.tobytes(), drafts.starts.tobytes(), *_lists(drafts.token_ids)),
    )


def decode_step(step: Step) -> SchedulerOutput:
    """Return the step that `encode_step` was given.

    Raises:
        ValueError: arrays that belong together differ in length.
    """
    slots, num_tokens, wants_token, num_output_tokens = step.rows
    swap_out, copies, swap_in = (_int32(each).reshape(-1, 2) for each in step.blocks)
    writes, forced, drafts = step.block_writes, step.forced, step.drafts
    found = SchedulerOutput(
        slots=_int32(slots),
        num_tokens=_int32(num_tokens),
        wants_token=_array(wants_token, np.dtype(np.bool_)),
        num_output_tokens=_int32(num_output_tokens),
        num_decodes=step.num_decodes,
        new_requests=NO_NEW_REQUESTS
        if step.new_requests is None
        else _decode_new(step.new_requests),
        block_writes=NO_BLOCK_WRITES
        if writes is None
        else BlockWrites(
            _int32(writes[0]), _int32(writes[1]), _int32(writes[2]), _ragged(writes[3], writes[4])
        ),
        swap_out=swap_out,
        copies=copies,
        swap_in=swap_in,
        scored=None
        if step.scored is None
        else ScoredTokens(_int32(step.scored[0]), _int32(step.scored[1]), step.num_top),
        forced=None
        if forced is None
        else ForcedTokens(_int32(forced[0]), _int32(forced[1]), _ragged(forced[2], forced[3])),
        embedded=None if step.embedded is None else _int32(step.embedded),
        drafts=None
        if drafts is None
        else DraftTokens(_int32(drafts[0]), _int32(drafts[1]), _ragged(drafts[2], drafts[3])),
    )
    rows = len(found.slots)
    columns = (found.num_tokens, found.wants_token, found.num_output_tokens)
    if any(len(column) != rows for column in columns):
        raise ValueError(f"a step of {rows} rows has {[len(column) for column in columns]} values")
    return found


def _encode_new(new: NewRequestData) -> list[bytes]:
    arrays: list[bytes] = []
    for name, dtype in _NEW_REQUESTS.items():
        value = getattr(new, name)
        arrays += [value.tobytes()] if dtype is not None else _lists(value)
    return arrays


def _decode_new(arrays: list[bytes]) -> NewRequestData:
    rest = iter(arrays)
    found: dict[str, Any] = {}
    for name, dtype in _NEW_REQUESTS.items():
        first = next(rest)
        found[name] = _ragged(first, next(rest)) if dtype is None else _array(first, dtype)
    found["stop_token_ids"] = found["stop_token_ids"].reshape(-1, MAX_STOP_TOKEN_IDS)
    return NewRequestData(**found)


def _lists(lists: Ragged) -> Lists:
    return lists.start_loc.tobytes(), lists.values.tobytes()


def _ragged(start_loc: bytes, values: bytes) -> Ragged:
    found = Ragged(_int32(start_loc), _int32(values))
    if not len(found.start_loc) or found.start_loc[-1] != len(found.values):
        raise ValueError("the lists of a step are not as long as their values")
    return found


def _int32(content: bytes) -> NDArray[np.int32]:
    return _array(content, _INT32)


def _array(content: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(bytearray(content), dtype)  # torch takes no memory that is read-only
