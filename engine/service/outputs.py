"""Output tensors of token chunks, without their text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Chunk

Array = NDArray[Any]

UNFINISHED = "None"  # vllm_backend's finish_reason of an unfinished sequence


def chunk_tensors(chunks: list[Chunk]) -> dict[str, Array]:
    """Return the outputs that need no tokenizer, with one element per chunk.

    `token_ids` and `output_log_probs` have one element per token, chunk after chunk. The latter
    and `cum_log_probs`, which vllm_backend calls `cumulative_logprob`, are there if the request
    asked for logprobs.
    """
    outputs = {
        "token_ids": np.array([i for chunk in chunks for i in chunk.token_ids], dtype=np.int32),
        "sequence_index": np.array([chunk.index for chunk in chunks], dtype=np.int32),
        "finish_reason": strings([chunk.finish_reason or UNFINISHED for chunk in chunks]),
        "num_output_tokens": np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32),
    }
    if all(chunk.cumulative_logprob is not None for chunk in chunks):
        chosen = [p.logprobs[0] for chunk in chunks for p in chunk.logprobs or []]
        total = [chunk.cumulative_logprob for chunk in chunks]
        outputs["output_log_probs"] = np.array(chosen, dtype=np.float32)
        outputs["cum_log_probs"] = np.array(total, dtype=np.float32)
        outputs["cumulative_logprob"] = outputs["cum_log_probs"]
    return outputs


def strings(values: list[str]) -> Array:
    """Return a BYTES tensor."""
    return np.array([value.encode("utf-8") for value in values], dtype=object)
