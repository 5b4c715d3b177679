"""SpeculativeConfig: how the next tokens of a sequence are guessed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Count = Annotated[int, Field(ge=1, le=64, strict=True)]
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4  # tokens


class SpeculativeConfig(BaseModel):
    """vLLM's `speculative_config`, as far as it is supported. Immutable.

    Attributes:
        method: ngram: proposes what followed the latest match of the last tokens (prompt lookup).
        num_speculative_tokens: guesses for one sequence in a step at most.
        prompt_lookup_max, prompt_lookup_min: bounds of the number of last tokens that are matched;
            the longest match wins. Where one is None, it is as the other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"]
    num_speculative_tokens: _Count
    prompt_lookup_max: _Count | None = None
    prompt_lookup_min: _Count | None = None

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """How many last tokens must have come before, at least and at most; by default 2 and 4."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            return most or _LOOKUP_MIN, most or _LOOKUP_MAX
        return least, most or least

    @model_validator(mode="before")
    @classmethod
    def _object(cls, fields: Any) -> Any:
        if not isinstance(fields, dict | cls):
            raise ValueError("must be a JSON object")
        return fields

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        least, most = self.lookup_lengths
        if least > most:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max ({most})")
        return self
