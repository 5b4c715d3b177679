"""NgramProposer: proposes what followed the latest match of the last tokens (prompt lookup)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.config.speculative_config import SpeculativeConfig
from engine.core.request import Request


class NgramProposer:
    """Looks the last tokens up in the prompt and the output; finds copies and repetitions.

    Attributes:
        max_tokens: as of `Proposer`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """Look up as many tokens as `config` says."""
        self.max_tokens = config.num_speculative_tokens
        self._least, self._most = config.lookup_lengths

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> NgramProposer | None:
        """Return the proposer that `config` asks for; None: none."""
        return None if config is None else cls(config)

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        """Return `num_tokens` guesses, or none."""
        return followers(request.token_ids, num_tokens, least=self._least, most=self._most)


def followers(
    token_ids: NDArray[np.int32], num_tokens: int, *, least: int, most: int
) -> NDArray[np.int32]:
    """Return `num_tokens` tokens that followed the end of `token_ids` earlier on, or none.

    The longest suffix of `least` to `most` tokens that occurred earlier is matched; its latest
    occurrence counts. If the match overlaps the end, the tokens that follow it repeat.
    """
    end = len(token_ids)
    places = np.flatnonzero(token_ids[:-1] == token_ids[-1])  # of the last token, earlier on
    length = min(len(places), 1)
    while 0 < length < most:
        longer = places[places >= length]
        longer = longer[token_ids[longer - length] == token_ids[end - 1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    if length < least:
        return token_ids[:0]
    start = int(places[-1]) + 1
    found: NDArray[np.int32] = token_ids[start + np.arange(num_tokens) % (end - start)]
    return found
