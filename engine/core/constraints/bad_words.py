"""BadWords: the token sequences that one request must not produce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The `bad_words` of a request as token sequences."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        """Index `words`, none of them empty, by the token before their last one."""
        self._always: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *head, last in words:
            if head:
                self._after.setdefault(head[-1], []).append((list(head), last))
            else:
                self._always.append(last)

    def forbidden(self, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> list[int]:
        """Return the last token of each word whose other tokens have just been produced."""
        return self._always + [
            last
            for head, last in self._after.get(int(token_ids[-1]), ())
            if token_ids[max(num_prompt_tokens, len(token_ids) - len(head)) :].tolist() == head
        ]
