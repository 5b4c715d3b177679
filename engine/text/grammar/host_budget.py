"""HostBudget: the CPU time that the host may spend on the grammar of one sequence."""

from __future__ import annotations

from engine.text.grammar.spec import GrammarKind, GrammarTextError

# A usual mask takes 0.05 to 1 ms. What exceeds this on average waits behind all others.
_FAST_START_S, _FAST_TOKEN_S = 0.005, 0.001
# The life of a sequence, and its longest mask: an ambiguous grammar has more and more parses of the
# same text, and each of them takes part in each mask. Rules that a client has written may be so;
# others are wide at worst, and a large set of tools may need 0.1 s for a mask of a new kind.
_RULES_START_S, _RULES_TOKEN_S = 0.1, 0.002
_START_S, _TOKEN_S = 0.25, 0.005
_MAX_MASK_S = 0.25


class HostBudget:
    """Adds up what the tokens of a sequence, or of all sequences of a grammar, have cost.

    Attributes:
        spent_s: CPU seconds so far.
        num_tokens: tokens that these were spent for.
    """

    def __init__(self, kind: GrammarKind = "json_schema") -> None:
        """Start with nothing spent on a grammar of this kind."""
        is_rules = kind == "grammar"
        self._start_s = _RULES_START_S if is_rules else _START_S
        self._token_s = _RULES_TOKEN_S if is_rules else _TOKEN_S
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
        allowed_s = self._start_s + self._token_s * self.num_tokens
        if cpu_s > _MAX_MASK_S or self.spent_s > allowed_s:
            raise GrammarTextError(
                f"is too ambiguous: after {self.num_tokens} tokens its masks have taken "
                f"{1e3 * self.spent_s:.0f} ms, the last one {1e3 * cpu_s:.0f} ms; write rules so "
                "that only one matches each text (left-recursive, with longer terminals)"
            )
