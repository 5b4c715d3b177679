"""What the offline API returns, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.protocol.messages import RequestStats, SequenceOutput
from engine.text.output_parsing.parser import Section


class Logprob(NamedTuple):
    """Log-probability of one token at one position, before temperature and penalties."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence of a request.

    Attributes:
        index: of the `n` sequences, from 0.
        text: the output as text, cut at a stop string.
        token_ids: the output tokens, including those of a stop string.
        cumulative_logprob: sum over the chosen tokens, if logprobs were asked for.
        logprobs: per output token, token id -> Logprob; the chosen token comes first.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop token id or stop string that ended it.
        sections: what of the text is content, reasoning and tool calls, if it was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    sections: list[Section] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One finished request.

    Attributes:
        request_id: a number that no other request of this `LLM` has.
        prompt: its text, for a conversation what the chat template made of it; None if only token
            ids were given.
        prompt_logprobs: if asked for, per token of the prompt, token id -> Logprob; its own entry
            comes first. None for the first token, and of an aborted request.
        metrics: those of its first sequence.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    metrics: RequestStats

    @property
    def finished(self) -> bool:
        """True: there are no outputs before the end."""
        return True

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV came from the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt that has been embedded; `request_id` as in `RequestOutput`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]

    @classmethod
    def of(cls, output: SequenceOutput, prompt_token_ids: list[int]) -> EmbeddingRequestOutput:
        """Return what the engine has found for a prompt."""
        assert output.embedding is not None
        values = np.frombuffer(output.embedding, dtype="<f4").tolist()
        return cls(str(output.uid), EmbeddingOutput(values), prompt_token_ids)

    @property
    def finished(self) -> bool:
        """True: there are no outputs before the end."""
        return True
