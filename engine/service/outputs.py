"""Output tensors of token chunks, without their text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.protocol import Chunk
from engine.token_ids import unpack_token_ids

Array = NDArray[Any]

UNFINISHED = "None"  # vllm_backend's finish_reason of an unfinished sequence


def chunk_tensors(chunks: list[Chunk]) -> dict[str, Array]:
    """Return the outputs that need no tokenizer, with one element per chunk.

    `token_ids` and `output_log_probs` have one element per token, chunk after chunk. The latter
    and `cum_log_probs`, which vllm_backend calls `cumulative_logprob`, are there if the request
    asked for logprobs.
    """
    details = [chunk.details for chunk in chunks]
    outputs = {
        "token_ids": unpack_token_ids(b"".join([chunk.token_ids for chunk in chunks])),
        "sequence_index": np.array([chunk.index for chunk in chunks], dtype=np.int32),
        "finish_reason": strings([each.finish_reason or UNFINISHED for each in details]),
        "num_output_tokens": np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32),
    }
    if all(each.cumulative_logprob is not None for each in details):
        chosen = [position.logprobs[0] for each in details for position in each.logprobs or []]
        total = [each.cumulative_logprob for each in details]
        outputs["output_log_probs"] = np.array(chosen, dtype=np.float32)
        outputs["cum_log_probs"] = np.array(total, dtype=np.float32)
        outputs["cumulative_logprob"] = outputs["cum_log_probs"]
    return outputs


def strings(values: list[str]) -> Array:
    """Return a BYTES tensor."""
    return np.array([value.encode("utf-8") for value in values], dtype=object)
