"""StepOutputs: what the steps of the engine have produced, as columns of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.protocol.messages import (
    NO_DETAILS,
    OutputDetails,
    Outputs,
    RequestFailed,
    SequenceOutput,
)
from engine.protocol.token_ids import TokenIds, pack_token_ids, unpack_token_ids

_INT64 = np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """New tokens of several sequences, released for their clients: one row per sequence.

    The rows of one sequence are in order of time. A row without tokens is possible, for a sequence
    that has ended. The engine holds back tokens whose text may still become part of a stop string.

    Attributes:
        uids: int64 [rows]: the request of each row.
        indexes: int32 [rows]: which of the request's `n` sequences.
        num_tokens: int32 [rows]: how many of `token_ids` belong to the row.
        num_window_tokens: int32 [rows]: how many of `window_ids` belong to the row.
        token_ids: int32 [sum of `num_tokens`]: the new tokens, row after row.
        window_ids: int32 [sum of `num_window_tokens`]: row after row, the tokens before the new
            ones that are needed to decode these.
        details: by row, of those rows alone that have rare fields: a finish reason, or
            log-probabilities.
        failures: requests that have failed. All their rows are here or were there before; nothing
            follows for them.
    """

    uids: NDArray[np.int64]
    indexes: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_window_tokens: NDArray[np.int32]
    token_ids: TokenIds
    window_ids: TokenIds
    details: Mapping[int, OutputDetails] = field(default_factory=dict)
    failures: Sequence[RequestFailed] = ()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.uids)

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return len(self.uids) > 0 or len(self.failures) > 0

    def check(self) -> None:
        """Raise `ValueError` unless the columns fit together."""
        rows = len(self.uids)
        for name in ("indexes", "num_tokens", "num_window_tokens"):
            if len(getattr(self, name)) != rows:
                raise ValueError(
                    f"{name}: must have {rows} rows, as uids (got {len(getattr(self, name))})"
                )
        for counts, ids in (("num_tokens", "token_ids"), ("num_window_tokens", "window_ids")):
            column = getattr(self, counts)
            if rows and column.min() < 0:
                raise ValueError(
                    f"{counts}: must not be negative (is in row {int(column.argmin())})"
                )
            if (total := int(column.sum(dtype=np.int64))) != len(getattr(self, ids)):
                raise ValueError(
                    f"{counts}: must add up to {len(getattr(self, ids))}, the number of {ids} (got "
                    f"{total})"
                )
        if any(not 0 <= row < rows for row in self.details):
            raise ValueError(f"details: must be of rows below {rows}")

    def rows(self) -> Iterator[SequenceOutput]:
        """Yield each row as an object, for callers in this process that want few of them."""
        token_end = window_end = 0
        columns = (self.uids, self.indexes, self.num_tokens, self.num_window_tokens)
        table = zip(*(column.tolist() for column in columns), strict=True)
        for row, (uid, index, num_tokens, num_window_tokens) in enumerate(table):
            token_start, token_end = token_end, token_end + num_tokens
            window_start, window_end = window_end, window_end + num_window_tokens
            details = self.details.get(row, NO_DETAILS)
            yield SequenceOutput(
                uid=uid,
                index=index,
                token_ids=self.token_ids[token_start:token_end].tolist(),
                window_ids=self.window_ids[window_start:window_end].tolist(),
                finish_reason=details.finish_reason,
                stop_reason=details.stop_reason,
                text_cut=details.text_cut,
                logprobs=details.logprobs,
                cumulative_logprob=details.cumulative_logprob,
                stats=details.stats,
                omit_stop_token=details.omit_stop_token,
                parser_state=details.parser_state,
                prompt_logprobs=details.prompt_logprobs,
                embedding=details.embedding,
            )

    @classmethod
    def of(cls, produced: Sequence[SequenceOutput | RequestFailed]) -> StepOutputs:
        """Return the columns of outputs and failures."""
        outputs = [each for each in produced if isinstance(each, SequenceOutput)]
        details = ((row, _details(output)) for row, output in enumerate(outputs))
        return cls(
            uids=np.array([each.uid for each in outputs], dtype=np.int64),
            indexes=np.array([each.index for each in outputs], dtype=np.int32),
            num_tokens=np.array([len(each.token_ids) for each in outputs], dtype=np.int32),
            num_window_tokens=np.array([len(each.window_ids) for each in outputs], dtype=np.int32),
            token_ids=np.array([i for each in outputs for i in each.token_ids], dtype=np.int32),
            window_ids=np.array([i for each in outputs for i in each.window_ids], dtype=np.int32),
            details={row: each for row, each in details if each != NO_DETAILS},
            failures=[each for each in produced if isinstance(each, RequestFailed)],
        )

    @classmethod
    def concatenated(cls, parts: Sequence[StepOutputs]) -> StepOutputs:
        """Return the rows and failures of `parts`, one behind the other."""
        parts = [part for part in parts if part]
        if len(parts) < 2:
            return parts[0] if parts else NO_OUTPUTS
        starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        return cls(
            uids=np.concatenate([part.uids for part in parts]),
            indexes=np.concatenate([part.indexes for part in parts]),
            num_tokens=np.concatenate([part.num_tokens for part in parts]),
            num_window_tokens=np.concatenate([part.num_window_tokens for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            window_ids=np.concatenate([part.window_ids for part in parts]),
            details={
                start + row: details
                for start, part in zip(starts, parts, strict=True)
                for row, details in part.details.items()
            },
            failures=[failure for part in parts for failure in part.failures],
        )

    def joined(self) -> StepOutputs:
        """Return the same tokens with the rows of each sequence in one row.

        Rows with details stay as they are, and separate those before them from those after them.
        The window of a joined row is that of its first one.
        """
        order = np.lexsort((self.indexes, self.uids))  # stable: a sequence keeps its order
        uids, indexes = self.uids[order], self.indexes[order]
        is_detailed = np.zeros(len(self), dtype=np.bool_)
        is_detailed[list(self.details)] = True
        is_detailed = is_detailed[order]
        begins = np.ones(len(self), dtype=np.bool_)
        begins[1:] = (uids[1:] != uids[:-1]) | (indexes[1:] != indexes[:-1])
        begins[1:] |= is_detailed[1:] | is_detailed[:-1]
        if begins.all():
            return self
        first = np.flatnonzero(begins)
        merged_rows = np.empty_like(order)  # of each row, in the result
        merged_rows[order] = np.cumsum(begins) - 1
        return StepOutputs(
            uids=uids[first],
            indexes=indexes[first],
            num_tokens=np.add.reduceat(self.num_tokens[order], first, dtype=np.int32),
            num_window_tokens=self.num_window_tokens[order[first]],
            token_ids=_rows(self.token_ids, self.num_tokens, order),
            window_ids=_rows(self.window_ids, self.num_window_tokens, order[first]),
            details={int(merged_rows[row]): details for row, details in self.details.items()},
            failures=self.failures,
        )

    def split(self) -> tuple[StepOutputs, StepOutputs]:
        """Return the first and the second half of the rows; failures are in the second."""
        middle = len(self) // 2
        return self._slice(0, middle, ()), self._slice(middle, len(self), self.failures)

    def _slice(self, start: int, stop: int, failures: Sequence[RequestFailed]) -> StepOutputs:
        tokens, windows = (
            slice(*(int(column[:row].sum(dtype=np.int64)) for row in (start, stop)))
            for column in (self.num_tokens, self.num_window_tokens)
        )
        return StepOutputs(
            uids=self.uids[start:stop],
            indexes=self.indexes[start:stop],
            num_tokens=self.num_tokens[start:stop],
            num_window_tokens=self.num_window_tokens[start:stop],
            token_ids=self.token_ids[tokens],
            window_ids=self.window_ids[windows],
            details={
                row - start: details for row, details in self.details.items() if start <= row < stop
            },
            failures=failures,
        )

    def message(self) -> Outputs:
        """Return the rows as a message; failures go in messages of their own."""
        return Outputs(
            uids=self.uids.astype(_INT64, copy=False).tobytes(),
            indexes=pack_token_ids(self.indexes),
            num_tokens=pack_token_ids(self.num_tokens),
            num_window_tokens=pack_token_ids(self.num_window_tokens),
            token_ids=pack_token_ids(self.token_ids),
            window_ids=pack_token_ids(self.window_ids),
            details=dict(self.details),
        )

    @classmethod
    def parse(cls, message: Outputs) -> StepOutputs:
        """Return the rows of a message.

        Raises:
            ValueError: its columns do not fit together.
        """
        if len(message.uids) % _INT64.itemsize:
            raise ValueError(f"uids: {len(message.uids)} bytes are not a whole number of int64")
        outputs = cls(
            uids=np.frombuffer(message.uids, dtype=_INT64),
            indexes=unpack_token_ids(message.indexes, "indexes"),
            num_tokens=unpack_token_ids(message.num_tokens, "num_tokens"),
            num_window_tokens=unpack_token_ids(message.num_window_tokens, "num_window_tokens"),
            token_ids=unpack_token_ids(message.token_ids, "token_ids"),
            window_ids=unpack_token_ids(message.window_ids, "window_ids"),
            details=message.details,
        )
        outputs.check()
        return outputs


def _rows(values: TokenIds, counts: NDArray[np.int32], rows: NDArray[np.intp]) -> TokenIds:
    """Return the values of `rows`; those of row i are the next `counts[i]` of `values`."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[rows]
    offsets = np.repeat(starts[rows] - (np.cumsum(taken, dtype=np.int64) - taken), taken)
    found: TokenIds = values[offsets + np.arange(len(offsets))]
    return found


def _details(output: SequenceOutput) -> OutputDetails:
    return OutputDetails(
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        text_cut=output.text_cut,
        omit_stop_token=output.omit_stop_token,
        logprobs=output.logprobs,
        cumulative_logprob=output.cumulative_logprob,
        stats=output.stats,
        parser_state=output.parser_state,
        prompt_logprobs=output.prompt_logprobs,
        embedding=output.embedding,
    )


NO_OUTPUTS = StepOutputs.of([])
