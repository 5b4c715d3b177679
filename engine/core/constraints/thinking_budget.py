"""ThinkingBudget: ends the reasoning of one sequence after `thinking_token_budget` tokens."""

from __future__ import annotations

from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.output_parsing.tracker import OutputTracker

_MAX_COMPLETING = 3  # tokens beyond the budget that may complete a character


class ThinkingBudget:
    """Has the tag come that ends reasoning, once the budget is spent.

    Reasoning that the model opens again, after it has begun to answer, is ended after a token: by
    then the host takes part in the choice, whether or not steps run ahead.

    Attributes:
        forced: the token that must come next; None: any may.
    """

    def __init__(self, num_tokens: int, parser_spec: ParserSpec, tracker: OutputTracker) -> None:
        """Allow `num_tokens` of the reasoning that `tracker` follows."""
        self._num_left = num_tokens
        self._format = parser_spec
        self._tracker = tracker
        self._was_reasoning = tracker.is_reasoning
        self._length = 0  # tokens of this reasoning
        self._end_ids: list[int] = []  # of the tag that is forced, those that are left
        self.forced = self._next()

    @property
    def host_chooses(self) -> bool:
        """Whether the next token, or the one after it, may have to be forced."""
        may_come = self._was_reasoning or not self._tracker.has_reasoning_ended
        return may_come and self._num_left <= 1

    def append(self, token_id: int) -> None:
        """Note the newest token, after `tracker` has."""
        if self._was_reasoning:
            self._num_left -= 1
            self._length += 1
        self._was_reasoning = self._tracker.is_reasoning
        if not self._was_reasoning:
            self._length = 0
        goes_on = self._was_reasoning and token_id == self.forced
        self._end_ids = self._end_ids[1:] if goes_on else []
        self.forced = self._next()

    def _next(self) -> int | None:
        if not self._end_ids and self._has_to_end():
            tracker = self._tracker
            self._end_ids = self._format.end_ids(tracker.state, tracker.begun_tag)
        return self._end_ids[0] if self._end_ids else None

    def _has_to_end(self) -> bool:
        if not self._was_reasoning or self._num_left > 0:
            return False
        if self._tracker.has_reasoning_ended and not self._length:
            return False
        may_complete = self._num_left > -_MAX_COMPLETING
        return not (may_complete and self._tracker.is_inside_character)
