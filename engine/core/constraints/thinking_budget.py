"""ThinkingBudget: ends the reasoning of one sequence after `thinking_token_budget` tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.text.section_tracker import SectionTracker

_MAX_COMPLETING = 3  # tokens beyond the budget that may complete a character


class ThinkingBudget:
    """Has the tag come that ends reasoning, once the budget is spent.

    Reasoning that the model opens again, after it has begun to answer, is ended after a token: by
    then the host takes part in the choice, whether or not steps run ahead.

    Attributes:
        forced: the token that must come next; None: any may.
    """

    def __init__(
        self, num_tokens: int, end_ids: Mapping[int, Sequence[int]], sections: SectionTracker
    ) -> None:
        """Allow `num_tokens` of reasoning; `end_ids` as `SectionFormat.reasoning_end_ids`."""
        self._num_left = num_tokens
        self._end_ids = end_ids
        self._sections = sections
        self._was_reasoning = sections.is_reasoning
        self._length = 0  # tokens of this reasoning
        self._num_closing = 0  # tokens of its end tag that were forced
        self.forced = self._next()

    @property
    def host_chooses(self) -> bool:
        """Whether the next token, or the one after it, may have to be forced."""
        may_come = self._was_reasoning or not self._sections.has_reasoning_ended
        return may_come and self._num_left <= 1

    def append(self, token_id: int) -> None:
        """Note the newest token, after `sections` has."""
        if self._was_reasoning:
            self._num_left -= 1
            self._length += 1
        self._was_reasoning = self._sections.is_reasoning
        if not self._was_reasoning:
            self._length = 0
        is_closing = self._was_reasoning and token_id == self.forced
        self._num_closing = self._num_closing + 1 if is_closing else 0
        self.forced = self._next()

    def _next(self) -> int | None:
        if not self._was_reasoning or self._num_left > 0:
            return None
        end_ids = self._end_ids[self._sections.state]
        if self._num_closing:
            return end_ids[self._num_closing % len(end_ids)]
        if self._sections.has_reasoning_ended and not self._length:
            return None
        if self._sections.is_inside_character and self._num_left > -_MAX_COMPLETING:
            return None
        return end_ids[0]
