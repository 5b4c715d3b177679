"""HostBudget: the CPU time that the host may spend on the grammar of one sequence."""

from __future__ import annotations

from engine.text.grammar.spec import GrammarTextError

# A usual mask takes 0.05 to 1 ms. What exceeds this on average waits behind all others.
_FAST_START_S, _FAST_TOKEN_S = 0.005, 0.0005
# The life of a sequence, and its longest mask: an ambiguous grammar has more and more parses of the
# same text, and each of them takes part in each mask.
_START_S, _TOKEN_S = 0.25, 0.005
_MAX_MASK_S = 0.25


class HostBudget:
    """Adds up what the tokens of a sequence, or of all sequences of a grammar, have cost.

    Attributes:
        spent_s: CPU seconds so far.
        num_tokens: tokens that these were spent for.
    """

    def __init__(self) -> None:
        """Start with nothing spent."""
        self.spent_s = 0.0
        self.num_tokens = 0

    @property
    def is_small(self) -> bool:
        """Whether a step may wait for the next token: so far these have cost little on average."""
        return self.spent_s <= _FAST_START_S + _FAST_TOKEN_S * self.num_tokens

    def spend(self, cpu_s: float) -> None:
        """Add what one token has cost."""
        self.spent_s += cpu_s
        self.num_tokens += 1

    def check(self, cpu_s: float) -> None:
        """Raise `GrammarTextError` if too much is spent, or was for the last token (`cpu_s`)."""
        if cpu_s > _MAX_MASK_S or self.spent_s > _START_S + _TOKEN_S * self.num_tokens:
            raise GrammarTextError(
                f"is too ambiguous: after {self.num_tokens} tokens their masks have taken "
                f"{1e3 * self.spent_s:.0f} ms, the last one {1e3 * cpu_s:.0f} ms; write rules of "
                "which only one matches each text (left-recursive, with longer terminals)"
            )
