"""Draft tokens of a step (speculative decoding), as arrays."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.ragged import Int32s, Ragged


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Guesses of the next tokens of D sequences, computed behind the last token of each.

    Attributes:
        rows: int32 [D], ascending rows of the schedule, each of one known token and its drafts.
        starts: int32 [D], tokens of the sequence before the drafts.
        token_ids: the drafts, one or more for each.
    """

    rows: Int32s
    starts: Int32s
    token_ids: Ragged

    @property
    def most(self) -> int:
        """How many drafts the row with most of them has."""
        return int(self.token_ids.lengths.max())

    def reaching(self, number: int) -> tuple[Int32s, Int32s]:
        """Return the rows that have a draft of this number, from 1, and these drafts."""
        has_one = self.token_ids.lengths >= number
        indices = self.token_ids.start_loc[:-1][has_one] + number - 1
        return self.rows[has_one], self.token_ids.values[indices]
