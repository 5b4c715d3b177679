"""Host-side sampling constraints: grammar masks, bad words, thinking budget and processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.processors import AskedProcessor
from engine.core.constraints.token_masks import forbid, token_mask
from engine.core.ragged import Int32s
from engine.core.request import Request
from engine.core.schedule import (
    MAX_STOP_TOKEN_IDS,
    Adjustments,
    Float32s,
    SamplingBatch,
    SchedulerOutput,
)
from engine.errors import TridentError, shown
from engine.logits_processors import Adjustment, LogitsProcessor, ProcessorRow

_LARGEST = np.finfo(np.float32).max

_Sparse = tuple[NDArray[np.int64], NDArray[np.float64]]


class LogitsAdjuster:
    """The running sequences that ask for a processor."""

    def __init__(self, vocab_size: int) -> None:
        """Start with none."""
        self._vocab_size = vocab_size
        self._running: dict[int, Request] = {}  # by slot

    def add(self, slot: int, request: Request) -> None:
        """`request` runs in `slot`."""
        if request.processors:
            self._running[slot] = request

    def discard(self, slot: int) -> None:
        """No sequence runs in `slot` any more."""
        self._running.pop(slot, None)

    def adjustments(self, schedule: SchedulerOutput) -> Adjustments | None:
        """Return what is added to the logits of the newest `schedule`; None: nothing.

        What a processor does wrong is noted as the fault of the sequences concerned, which fail
        with their next token.
        """
        if not self._running:
            return None
        calls: dict[int, list[tuple[int, AskedProcessor]]] = {}  # by processor
        for row in np.flatnonzero(schedule.wants_token).tolist():
            request = self._running.get(int(schedule.slots[row]))
            if request is None or request.required_token is not None:
                continue
            for asked in request.processors:
                if asked.fault is None:
                    _show_tokens(asked.row, request)
                    calls.setdefault(id(asked.processor), []).append((row, asked))
        found = _Found(self._vocab_size)
        for asking in calls.values():
            rows = [asked.row for _, asked in asking]
            for (row, asked), answer in zip(
                asking, _ask(asking[0][1].processor, rows), strict=True
            ):
                try:
                    found.add(row, answer)
                except Exception as error:
                    text = f"the processor failed: {type(error).__name__}: {shown(str(error))}"
                    asked.fault = TridentError(text, param=asked.field)
                    asked.fault.__cause__ = error
        return found.merged()


def _show_tokens(row: ProcessorRow, request: Request) -> None:
    row.token_ids = request.token_ids.view()
    row.token_ids.flags.writeable = False
    row.num_prompt_tokens = request.num_prompt_tokens


def _ask(processor: LogitsProcessor, rows: Sequence[ProcessorRow]) -> list[Adjustment | Exception]:
    """Return the answer for each row, or why there is none.

    After an error each row is tried alone, so that it fails those alone that cause it.
    """
    try:
        answers: list[Adjustment | Exception] = [*processor.adjust(rows)]
        if len(answers) != len(rows):
            raise ValueError(f"{len(answers)} adjustments for {len(rows)} rows: give one per row")
    except Exception as error:
        if len(rows) == 1:
            return [error]
        return [answer for row in rows for answer in _ask(processor, [row])]
    return answers


class _Found:
    """The adjustments of a step, row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keys: list[NDArray[np.int64]] = []  # row * vocab_size + token
        self._values: list[NDArray[np.float64]] = []
        self._dense: dict[int, Float32s] = {}

    def add(self, row: int, answer: Adjustment | Exception) -> None:
        """Add what a processor has answered for `row`.

        Raises:
            Exception: it is an error, or no adjustment.
        """
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return
        if isinstance(answer, tuple):
            token_ids, values = self._sparse(*answer)
            self._keys.append(row * self._vocab_size + token_ids)
            self._values.append(values)
        else:
            whole = self._whole(answer)
            self._dense[row] = whole + self._dense[row] if row in self._dense else whole

    def _sparse(self, token_ids: Any, values: Any) -> _Sparse:
        ids, numbers = np.asarray(token_ids), np.asarray(values, dtype=np.float64)
        if ids.ndim != 1 or ids.shape != numbers.shape:
            raise ValueError(
                f"token ids of shape {list(ids.shape)} and values of shape {list(numbers.shape)}: "
                "both must be lists of the same length"
            )
        if not len(ids):
            return np.zeros(0, dtype=np.int64), numbers
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers (got {ids.dtype})")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"token ids must be 0 to {self._vocab_size - 1}, within the vocabulary"
            )
        if not (numbers < np.inf).all():
            raise ValueError("a value is NaN or positive infinity")
        return ids.astype(np.int64), numbers.clip(max=_LARGEST)

    def _whole(self, values: Any) -> Float32s:
        numbers = np.asarray(values)
        if numbers.shape != (self._vocab_size,):
            raise ValueError(
                f"values must have shape [{self._vocab_size}] (got {list(numbers.shape)})"
            )
        if numbers.dtype.kind not in "iuf":
            raise ValueError(f"values must be numbers (got {numbers.dtype})")
        if not -np.inf < numbers.max() < np.inf:  # false for NaN, which is the maximum then
            raise ValueError("a value is NaN or positive infinity, or all are negative infinity")
        with np.errstate(over="ignore"):
            return numbers.clip(max=_LARGEST).astype(np.float32)

    def merged(self) -> Adjustments | None:
        """Return all of them, with each token of a row once; None if there are none."""
        if not self._keys and not self._dense:
            return None
        rows = token_ids = np.zeros(0, dtype=np.int32)
        values = np.zeros(0, dtype=np.float32)
        if self._keys:
            rows, token_ids, values = self._sums()
        dense = np.zeros((0, self._vocab_size), dtype=np.float32)
        if self._dense:
            dense = np.stack([*self._dense.values()])
        return Adjustments(rows, token_ids, values, np.array([*self._dense], dtype=np.int32), dense)

    def _sums(self) -> tuple[Int32s, Int32s, Float32s]:
        keys, inverse = np.unique(np.concatenate(self._keys), return_inverse=True)
        sums = np.bincount(inverse, weights=np.concatenate(self._values))
        rows, token_ids = np.divmod(keys, self._vocab_size)
        with np.errstate(over="ignore"):  # to -inf
            values = sums.clip(max=_LARGEST).astype(np.float32)
        return rows.astype(np.int32), token_ids.astype(np.int32), values


class SamplingConstraints:
    """The running sequences with a grammar, bad words, a thinking budget, or `min_tokens` and more
    stop tokens than the device knows; and those with logits processors.
    """

    def __init__(self, *, vocab_size: int) -> None:
        """Start with none."""
        self._every_token = token_mask(np.arange(vocab_size, dtype=np.int32), -(-vocab_size // 32))
        self._nothing = SamplingBatch(np.zeros(0, dtype=np.int32), self._every_token[None][:0])
        self._vocab_size = vocab_size
        self._adjuster = LogitsAdjuster(vocab_size)
        self._running: dict[int, tuple[Request, NDArray[np.int32]]] = {}  # by slot, with its mask

    def add(self, slot: int, request: Request) -> None:
        """`request` runs in `slot`."""
        self._adjuster.add(slot, request)
        if (
            request.bad_words
            or request.grammar
            or request.thinking
            or (
                request.sampling_params.min_tokens
                and len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS
            )
        ):
            mask, allowed = self._every_token, request.sampling_params.allowed_token_ids
            if allowed is not None:
                mask = token_mask(np.array(allowed, dtype=np.int32), len(mask))
            self._running[slot] = request, mask

    def discard(self, slot: int) -> None:
        """No sequence runs in `slot` any more."""
        self._running.pop(slot, None)
        self._adjuster.discard(slot)

    def batch(self, schedule: SchedulerOutput) -> SamplingBatch:
        """Return the masks of the rows of the newest `schedule` that must not get some tokens.

        And what the logits processors of its rows add.
        """
        masked = self._masked(schedule) if self._running else self._nothing
        adjustments = self._adjuster.adjustments(schedule)
        return masked if adjustments is None else replace(masked, adjustments=adjustments)

    def _masked(self, schedule: SchedulerOutput) -> SamplingBatch:
        rows = {
            row: self._running[slot]
            for row in np.flatnonzero(schedule.wants_token).tolist()
            if (slot := int(schedule.slots[row])) in self._running
        }
        masks = {}
        for row, (request, allowed) in rows.items():
            left = allowed
            if request.grammar is not None:
                left = allowed & request.grammar.mask(self._vocab_size)
            mask = _mask(request, left, int(schedule.num_output_tokens[row]))
            if mask is not None:
                masks[row] = mask
        if not masks:
            return self._nothing
        return SamplingBatch(np.array([*masks], dtype=np.int32), np.stack([*masks.values()]))


def _mask(
    request: Request, left: NDArray[np.int32], num_output_tokens: int
) -> NDArray[np.int32] | None:
    """Return the allowed tokens of a row, within `left`; None if the device knows them.

    A token that is required must come, if a grammar does not forbid it. What is forbidden beyond
    that is allowed if nothing else is left. A grammar that leaves nothing fails with whatever
    token comes.
    """
    if (token_id := request.required_token) is not None:
        required = left & token_mask(np.array([token_id], dtype=np.int32), len(left))
        if required.any():
            return required
    if forbidden := _forbidden(request, num_output_tokens):
        mask = left.copy()
        forbid(mask, np.array(forbidden, dtype=np.int32))
        if mask.any():
            return mask
    return left if request.grammar is not None and left.any() else None


def device_forbids_stops(request: Request) -> bool:
    """Whether the device forbids the stop tokens of `request` before `min_tokens`.

    It knows them, the host forbids nothing itself, and they do not leave it without any token.
    """
    params, stops = request.sampling_params, request.stop_token_ids
    return (
        params.min_tokens > 0
        and 0 < len(stops) <= MAX_STOP_TOKEN_IDS
        and request.bad_words is None
        and request.grammar is None
        and request.thinking is None
        and (params.allowed_token_ids is None or not stops.issuperset(params.allowed_token_ids))
    )


def _forbidden(request: Request, num_output_tokens: int) -> list[int]:
    found = []
    if request.bad_words is not None:
        assert num_output_tokens == request.num_output_tokens, "a token has not been read"
        found += request.bad_words.forbidden(request.token_ids, request.num_prompt_tokens)
    if num_output_tokens < request.sampling_params.min_tokens:
        found += request.stop_token_ids
    return found
