"""SpeculativeConfig: how the next tokens of a sequence are guessed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Count = Annotated[int, Field(ge=1, le=64)]
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4  # tokens


class SpeculativeConfig(BaseModel):
    """vLLM's `speculative_config`, as far as it is supported. Immutable.

    Attributes:
        method: ngram: what followed the last tokens where they came before in the sequence.
        num_speculative_tokens: guesses for one sequence in a step at most.
        prompt_lookup_max, prompt_lookup_min: how many last tokens must have come before: as many
            as possible between the two. Where one is given, the other is the same; by default they
            are 4 and 2.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram"]
    num_speculative_tokens: _Count
    prompt_lookup_max: _Count = _LOOKUP_MAX
    prompt_lookup_min: _Count = _LOOKUP_MIN

    @model_validator(mode="before")
    @classmethod
    def _same(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        most, least = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        if most is None and least is not None:
            return {**given, "prompt_lookup_max": least}
        if least is None and most is not None:
            return {**given, "prompt_lookup_min": most}
        return given

    @model_validator(mode="after")
    def _ordered(self) -> SpeculativeConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self
