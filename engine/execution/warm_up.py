"""The steps that an engine runs before it serves: they launch every kernel that requests can reach.

A kernel is compiled, and its code loaded, at its first launch: no request waits for either. Each
step admits sequences whose blocks are all the null block, so nothing else need be allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.core.kv.block_pool import NULL_BLOCK
from engine.core.kv.group_windows import blocks_for
from engine.core.logprobs.scored_tokens import ScoredTokens
from engine.core.request import Request
from engine.core.schedule import Adjustments, SamplingBatch, SchedulerOutput
from engine.core.schedule_builder import ScheduleBuilder
from engine.core.seq_slots import SeqSlots
from engine.execution.devices import ResolvedConfig
from engine.request.sampling_params import SamplingParams
from kernels.quantized.splits import MOST_SPLIT
from kernels.quantized.wna16_gemm import MOST_TILED
from kernels.step.sampling_columns import SAMPLING_COLUMNS

_PLAIN = SamplingParams(temperature=0)


def largest_step(
    config: ResolvedConfig, max_model_len: int, num_groups: int = 1
) -> SchedulerOutput:
    """Return the step that takes the most memory: as many tokens and rows as there may be.

    Each row uses every feature of sampling that takes memory per token of the vocabulary.
    """
    num_rows = config.max_num_seqs
    num_tokens = min(config.max_num_batched_tokens, num_rows * max_model_len)
    lengths = np.diff(np.linspace(0, num_tokens, num_rows + 1).astype(int))
    used: dict[str, Any] = {name: column.on for name, column in SAMPLING_COLUMNS.items()}
    params = SamplingParams(
        **used,
        logit_bias={0: 1.0},
        allowed_token_ids=(0,),
        logprobs=config.max_logprobs,
        prompt_logprobs=config.max_logprobs,
    )
    return padding_step(lengths.tolist(), params, config.block_size, num_groups)


def warm_up_steps(
    config: ResolvedConfig, max_model_len: int, num_groups: int = 1
) -> Iterator[SchedulerOutput]:
    """Yield steps that launch the kernels in all forms that a step can reach; the largest first."""
    yield largest_step(config, max_model_len, num_groups)
    most = config.max_num_batched_tokens
    # Small prefill tiles; few log-probabilities, which are not found as many are; and biases in a
    # step without masks.
    one = min(1, config.max_logprobs)
    few = SamplingParams(temperature=0, logprobs=one, prompt_logprobs=one, logit_bias={0: 1.0})
    yield padding_step([min(2, max_model_len, most)], few, config.block_size, num_groups)
    long = [max_model_len] * (most // max_model_len) + [most % max_model_len]
    long = [length for length in long if length][: config.max_num_seqs]
    none = SamplingParams(temperature=1.0, logprobs=0, prompt_logprobs=0)
    yield padding_step(long, none, config.block_size, num_groups)
    # Products of quantised weights have forms of up to 16 tokens, up to each of these, and more.
    for num_tokens in (MOST_TILED, MOST_SPLIT):
        lengths = np.diff(np.linspace(0, min(num_tokens, sum(long)), len(long) + 1).astype(int))
        lengths = lengths[lengths > 0]
        yield padding_step(lengths.tolist(), _PLAIN, config.block_size, num_groups)
    # One row has products of its own; the splits of decode rows are planned by powers of two.
    num_rows = 0
    while num_rows < config.max_num_seqs:
        num_rows = min(max(2 * num_rows, 1), config.max_num_seqs)
        yield padding_step([1] * num_rows, _PLAIN, config.block_size, num_groups)


def warm_up_sampling(num_rows: int, num_words: int, vocab_size: int) -> SamplingBatch:
    """Return a batch in which the host takes part for the first rows, and changes nothing.

    A row alone has an adjustment of all of its logits: they are made one after the other.
    """
    rows = np.arange(num_rows, dtype=np.int32)
    values = np.zeros(num_rows, dtype=np.float32)
    dense = np.zeros((len(rows[:1]), vocab_size), dtype=np.float32)
    adjustments = Adjustments(rows, 0 * rows, values, rows[:1], dense)
    masks = np.full((num_rows, num_words), -1, dtype=np.int32)
    return SamplingBatch(rows, masks, adjustments if num_rows else None)


def padding_step(
    lengths: Sequence[int], params: SamplingParams, block_size: int, num_groups: int = 1
) -> SchedulerOutput:
    """Return a step that computes prompts of `lengths` tokens in the first slots, in any order.

    All their tokens are token 0, and all their blocks the null block. With `prompt_logprobs` all
    are scored.
    """
    states = SeqSlots(len(lengths), max(lengths), block_size)
    step = ScheduleBuilder(states)
    for length in sorted(lengths):
        request = Request(0, np.zeros(length, dtype=np.int32), params, max_tokens=2, seed=0)
        table = [NULL_BLOCK] * blocks_for(length, block_size)
        request.kv.tables = [table] * num_groups
        states.assign(request)
        step.admit(request, length)
    schedule = step.build()
    if params.prompt_logprobs is None:
        return schedule
    logits_indices = np.arange(sum(lengths), dtype=np.int32)
    return replace(
        schedule,
        scored=ScoredTokens(logits_indices, np.zeros_like(logits_indices), params.prompt_logprobs),
    )
