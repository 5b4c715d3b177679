"""Output tensors that the engine stub makes of token chunks: all that need no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.kv.group_windows import blocks_for
from engine.protocol.messages import Chunk, PromptLogprobs, RequestStats
from engine.protocol.prompt_logprobs import logprobs_of
from engine.protocol.token_ids import unpack_token_ids

Array = NDArray[Any]
Figure = Callable[[RequestStats, int], float]  # of a sequence, and the size of its KV blocks

UNFINISHED = "None"  # vllm_backend's finish_reason of an unfinished sequence


def chunk_tensors(
    chunks: list[Chunk], wanted: Collection[str], num_prompt_tokens: int, block_size: int
) -> dict[str, Array]:
    """Return those of the `wanted` outputs that need no tokenizer, with one element per chunk.

    `token_ids` and `output_log_probs` have one element per token, chunk after chunk. The latter
    and `cum_log_probs`, which vllm_backend calls `cumulative_logprob`, are there if the request
    asked for logprobs. `prompt_log_probs` has one element per token of the prompt but the first,
    and is in the first response, if the request asked for prompt_logprobs. `embedding` is that of
    the prompt, if the request asked for it. Times,
    figures of the cache and `stop_reason`, which is JSON, come when a sequence has finished;
    `num_input_tokens` is one number.
    """
    outputs = {name: _COLUMNS[name](chunks) for name in wanted if name in _COLUMNS}
    if "num_input_tokens" in wanted:
        outputs["num_input_tokens"] = np.array([num_prompt_tokens], dtype=np.int32)
    if any(chunk.details.stats is not None for chunk in chunks):
        figures = {name: _FIGURES[name] for name in wanted if name in _FIGURES}
        outputs.update((name, _figures(chunks, figures[name], block_size)) for name in figures)
        if "stop_reason" in wanted:
            outputs["stop_reason"] = _stop_reason(chunks)
    if any(name in _LOGPROBS for name in wanted) and all(
        chunk.details.cumulative_logprob is not None for chunk in chunks
    ):
        outputs.update((name, _LOGPROBS[name](chunks)) for name in wanted if name in _LOGPROBS)
    prompt = prompt_logprobs_in(chunks)
    if prompt is not None and "prompt_log_probs" in wanted:
        outputs["prompt_log_probs"] = logprobs_of(prompt)
    if "embedding" in wanted and (found := chunks[0].details.embedding) is not None:
        outputs["embedding"] = np.frombuffer(found, dtype="<f4")
    return outputs


def prompt_logprobs_in(chunks: list[Chunk]) -> PromptLogprobs | None:
    """Return those of the prompt, if `chunks` have them."""
    found = (chunk.details.prompt_logprobs for chunk in chunks)
    return next((each for each in found if each is not None), None)


def strings(values: list[str]) -> Array:
    """Return a BYTES tensor."""
    return np.array([value.encode("utf-8") for value in values], dtype=object)


def _token_ids(chunks: list[Chunk]) -> Array:
    return unpack_token_ids(b"".join([chunk.token_ids for chunk in chunks]))


def _sequence_index(chunks: list[Chunk]) -> Array:
    return np.array([chunk.index for chunk in chunks], dtype=np.int32)


def _finish_reason(chunks: list[Chunk]) -> Array:
    return strings([chunk.details.finish_reason or UNFINISHED for chunk in chunks])


def _stop_reason(chunks: list[Chunk]) -> Array:
    reasons = [msgspec.json.encode(chunk.details.stop_reason) for chunk in chunks]
    return np.array(reasons, dtype=object)


def _num_output_tokens(chunks: list[Chunk]) -> Array:
    return np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)


def _output_log_probs(chunks: list[Chunk]) -> Array:
    chosen = [token.logprobs[0] for chunk in chunks for token in chunk.details.logprobs or ()]
    return np.array(chosen, dtype=np.float32)


def _cumulative_logprob(chunks: list[Chunk]) -> Array:
    return np.array([chunk.details.cumulative_logprob for chunk in chunks], dtype=np.float32)


def _figures(chunks: list[Chunk], figure: Figure, block_size: int) -> Array:
    """Return one figure of the sequences that have finished; 0 for others."""
    stats = [chunk.details.stats for chunk in chunks]
    return np.array([0 if each is None else figure(each, block_size) for each in stats])


def _num_reused_blocks(stats: RequestStats, block_size: int) -> int:
    return stats.num_cached_tokens // block_size


def _num_new_blocks(stats: RequestStats, block_size: int) -> int:
    """Return how many blocks the sequence needed beside those of the prefix cache."""
    stored = stats.num_prompt_tokens + max(stats.num_output_tokens - 1, 0)  # not the last token's
    return blocks_for(stored, block_size) - _num_reused_blocks(stats, block_size)


_COLUMNS: dict[str, Callable[[list[Chunk]], Array]] = {
    "token_ids": _token_ids,
    "sequence_index": _sequence_index,
    "finish_reason": _finish_reason,
    "num_output_tokens": _num_output_tokens,
}
_LOGPROBS: dict[str, Callable[[list[Chunk]], Array]] = {
    "output_log_probs": _output_log_probs,
    "cum_log_probs": _cumulative_logprob,
    "cumulative_logprob": _cumulative_logprob,
}
_FIGURES: dict[str, Figure] = {
    "num_cached_tokens": lambda stats, _: stats.num_cached_tokens,
    "kv_cache_reused_blocks": _num_reused_blocks,
    # As TensorRT-LLM counts them, both are without those that were reused.
    "kv_cache_alloc_new_blocks": _num_new_blocks,
    "kv_cache_alloc_total_blocks": _num_new_blocks,
    "arrival_time_ns": lambda stats, _: int(stats.arrival_time * 1e9),
    "first_scheduled_time_ns": lambda stats, _: int(stats.first_scheduled_time * 1e9),
    "first_token_time_ns": lambda stats, _: int(stats.first_token_time * 1e9),
    "last_token_time_ns": lambda stats, _: int(stats.finished_time * 1e9),
    "total_draft_tokens": lambda stats, _: stats.num_draft_tokens,
    "total_accepted_draft_tokens": lambda stats, _: stats.num_accepted_draft_tokens,
    "acceptance_rate": lambda stats, _: (
        stats.num_accepted_draft_tokens / max(stats.num_draft_tokens, 1)
    ),
}
