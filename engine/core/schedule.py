"""The data of a step: SchedulerOutput to the model runner, and SamplerOutput back.

All of it is NumPy arrays and numbers, without a reference to a request or to a device, so that the
runner may be in another process. "[A + 1]" arrays called `start_loc` divide an array of lists, one
after the other: `values[start_loc[i] : start_loc[i + 1]]` is the list of item i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.logprobs.scored_tokens import ScoredLogprobs, ScoredTokens
from engine.core.ragged import Int32s, Ragged
from engine.core.spec_decode.draft_tokens import DraftTokens
from kernels.step.sampling_columns import SamplingColumns

Float32s = NDArray[np.float32]

# Stop tokens per sequence that the device checks. Sequences with more have the rest of them checked
# when the host reads their tokens.
MAX_STOP_TOKEN_IDS = 16


@dataclass(frozen=True, slots=True)
class NewRequestData(SamplingColumns[NDArray[Any]]):
    """The A sequences that get a slot in a step: new ones, and ones resumed after a preemption.

    It has the arrays [A] of `SamplingColumns` too.

    Attributes:
        slots: int32 [A].
        token_ids: prompt and output so far, at least one token each.
        num_prompt_tokens: int32 [A].
        num_computed_tokens: int32 [A], tokens whose KV is in the cache.
        min_tokens, max_tokens: int32 [A], limits of the output.
        stop_token_ids: int32 [A, MAX_STOP_TOKEN_IDS], the first ones, padded with -1.
        features: int32 [A], the feature bits of `kernels.step.sampling_columns`.
        seeds: uint64 [A].
        num_top_logprobs: int32 [A], most likely tokens to report beside the drawn one.
        bias_token_ids: tokens with a `logit_bias`, ascending.
        bias_values: float32, of each of these tokens.
        allowed_token_ids: lists of tokens.
    """

    slots: Int32s
    token_ids: Ragged
    num_prompt_tokens: Int32s
    num_computed_tokens: Int32s
    min_tokens: Int32s
    max_tokens: Int32s
    stop_token_ids: Int32s
    features: Int32s
    seeds: NDArray[np.uint64]
    num_top_logprobs: Int32s
    bias_token_ids: Ragged
    bias_values: Float32s
    allowed_token_ids: Ragged


@dataclass(frozen=True, slots=True)
class BlockWrites:
    """New entries of block tables.

    Attributes:
        slots: int32 [N].
        groups: int32 [N], of layers; each at most once for a slot.
        starts: int32 [N], the first entry that changes.
        block_ids: the entries from there on.
    """

    slots: Int32s
    groups: Int32s
    starts: Int32s
    block_ids: Ragged


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Tokens that the host has appended to N running sequences, because no other could come.

    Attributes:
        slots: int32 [N], each at most once, without a token in flight.
        starts: int32 [N], tokens of the sequence before them.
        token_ids: the new ones.
    """

    slots: Int32s
    starts: Int32s
    token_ids: Ragged


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Which blocks the rows of a step read and write, in the layers that keep states.

    No block that a row writes is read or written by another; the null block, which is read before
    the first token, is not written.

    Attributes:
        reads: int32 [B], the state after `done` tokens of the sequence; those after them and before
            the step's are drafts that were accepted, whose inputs it has, too.
        writes: int32 [B], where the state after the known tokens of the step goes; may be the block
            that is read.
        saves: int32 [B, MOST_SAVES, 2], a position and the block that gets the state after so many
            tokens, too; -1 for none.
        done: int32 [B].
        kept: int32 [B], known tokens of the step: all but its drafts.
    """

    reads: Int32s
    writes: Int32s
    saves: Int32s
    done: Int32s
    kept: Int32s


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step of B rows: swap out, copy and swap in blocks, then compute tokens.

    Rows of one token come first: decode and prefill are different kernels, and each gets one
    range of the step's tokens. Within each kind, rows that sample a token come first.

    Attributes:
        slots: int32 [B], each at most once.
        num_tokens: int32 [B], how many tokens of the sequence are computed, at least 1; drafts are
            among them.
        wants_token: bool [B], they are its last ones, so that its next token is sampled.
        num_output_tokens: int32 [B], its output tokens before the one to be sampled; negative for a
            chunk that ends within the prompt.
        num_decodes: leading rows with one token.
        new_requests: sequences that get a slot; each has a row.
        block_writes: changed block tables, those of the new requests included.
        swap_out: int32 [N, 2], block of the device, block of the host to copy it to.
        copies: int32 [N, 2], source and destination; all are read before any is written.
        swap_in: int32 [N, 2], block of the host, block of the device to copy it to.
        scored: prompt tokens whose log-probabilities are found; None: there are none.
        forced: tokens that the device does not know yet; None: there are none.
        embedded: int32 [E], rows that want a token and whose last hidden state is wanted too; None:
            there are none.
        drafts: None: there are none.
        states: None: no layer keeps any.
    """

    slots: Int32s
    num_tokens: Int32s
    wants_token: NDArray[np.bool_]
    num_output_tokens: Int32s
    num_decodes: int
    new_requests: NewRequestData
    block_writes: BlockWrites
    swap_out: Int32s
    copies: Int32s
    swap_in: Int32s
    scored: ScoredTokens | None = None
    forced: ForcedTokens | None = None
    embedded: Int32s | None = None
    drafts: DraftTokens | None = None
    states: StateBlocks | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.slots)

    @property
    def total_num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.num_tokens.sum())


def num_sampled_rows(schedule: SchedulerOutput) -> int:
    """Return the number of leading rows up to the last one that wants a token."""
    rows = np.flatnonzero(schedule.wants_token)
    return int(rows[-1]) + 1 if len(rows) else 0


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is added to the logits of a step after penalties; -inf forbids a token.

    Attributes:
        rows: int32 [K], rows of the schedule.
        token_ids: int32 [K], each at most once for a row.
        values: float32 [K], what is added to the logits of these tokens.
        dense_rows: int32 [M], rows of the schedule, each at most once.
        dense: float32 [M, V], what is added to all of their logits.
    """

    rows: Int32s
    token_ids: Int32s
    values: Float32s
    dense_rows: Int32s
    dense: Float32s


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the host decides about the tokens of a step while its forward pass runs.

    Attributes:
        mask_rows: int32 [N], rows of the schedule, each at most once.
        masks: int32 [N, ceil(V / 32)], at least one token for each of them; bit t % 32 of word
            t // 32: token t may be drawn.
        adjustments: of the rows that ask for logits processors; None: there are none.
    """

    mask_rows: Int32s
    masks: Int32s
    adjustments: Adjustments | None = None


# Of a rank that does not draw.
NO_SAMPLING = SamplingBatch(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of K tokens of `SamplerOutput`, before temperature, masks and penalties.

    Those of a beam are after masks, biases and penalties of its log-probabilities; forbidden tokens
    have -inf.

    Attributes:
        rows: int32 [K], indices in `SamplerOutput`.
        logprobs: float32 [K], of the sampled tokens.
        ranks: int32 [K], 1 is the most likely token.
        num_top: int32 [K], how many of the most likely tokens are valid.
        top_token_ids: int32 [K, N], the most likely tokens, in order.
        top_logprobs: float32 [K, N].
    """

    rows: Int32s
    logprobs: Float32s
    ranks: Int32s
    num_top: Int32s
    top_token_ids: Int32s
    top_logprobs: Float32s


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The R tokens of a step, one for each row that wants one, in their order.

    Attributes:
        token_ids: int32 [R].
        finish_reasons: int32 [R]: RUNNING, or STOP or LENGTH if the sequence ends with the token;
            SKIPPED if it had ended in an earlier step, or if the token is behind a draft that has
            not been drawn, so that it is void.
        logprobs: of the sequences that ask for them.
        prompt_logprobs: of `SchedulerOutput.scored`.
        hidden: float32 [E, hidden_size], of `SchedulerOutput.embedded`.
        drafted: the tokens behind the first, second ... drafts of the rows that have one, as far as
            any was drawn.
    """

    token_ids: Int32s
    finish_reasons: Int32s
    logprobs: SampledLogprobs | None
    prompt_logprobs: ScoredLogprobs | None = None
    hidden: Float32s | None = None
    drafted: tuple[SamplerOutput, ...] = ()

    def row(self, index: int) -> SamplerOutput:
        """Return the token of one sequence, without what the step has found of prompts."""
        one, found = slice(index, index + 1), self.logprobs
        if found is not None:
            which = np.flatnonzero(found.rows == index)
            found = SampledLogprobs(
                rows=np.zeros_like(which, dtype=np.int32),
                logprobs=found.logprobs[which],
                ranks=found.ranks[which],
                num_top=found.num_top[which],
                top_token_ids=found.top_token_ids[which],
                top_logprobs=found.top_logprobs[which],
            )
        return SamplerOutput(self.token_ids[one], self.finish_reasons[one], found)
