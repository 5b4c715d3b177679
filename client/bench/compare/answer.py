"""Answer: what came back for one request, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Answer:
    """One streamed answer; times are those of `time.perf_counter`.

    Attributes:
        started: when the request was sent.
        arrivals: when each response with tokens came.
        num_tokens: that came, as the responses tell.
        num_prompt_tokens: that the server counted in the prompt; 0 if it does not say.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between two adjacent responses."""
        return [late - early for early, late in pairwise(self.arrivals)]

    def why_unusable(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        """Return in which way this is not the answer to a request of these lengths, or ""."""
        if self.num_tokens != num_output_tokens or not self.arrivals:
            return f"answered with {self.num_tokens} tokens where {num_output_tokens} were asked"
        if self.num_prompt_tokens not in (0, num_prompt_tokens):
            return (
                f"counted {self.num_prompt_tokens} tokens in a prompt of {num_prompt_tokens}: "
                "it uses another tokenizer, or cuts prompts"
            )
        return ""
