"""Answer: the responses to one request, with their arrival times."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Answer:
    """One streamed answer; times are by `time.perf_counter`.

    Attributes:
        started: when the request was sent.
        arrivals: arrival time of each response with tokens.
        num_tokens: output tokens, as the responses report them.
        num_prompt_tokens: prompt tokens counted by the server; 0 if not reported.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between consecutive responses."""
        return [late - early for early, late in pairwise(self.arrivals)]

    def why_unusable(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        """Return why this does not answer a request of these lengths, or ""."""
        if self.num_tokens != num_output_tokens or not self.arrivals:
            return f"answered with {self.num_tokens} tokens where {num_output_tokens} were asked"
        if self.num_prompt_tokens not in (0, num_prompt_tokens):
            return (
                f"counted {self.num_prompt_tokens} tokens in a prompt of {num_prompt_tokens}: "
                "it uses another tokenizer, or cuts prompts"
            )
        return ""
