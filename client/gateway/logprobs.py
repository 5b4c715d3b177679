"""Log-probabilities in the forms of OpenAI's two routes, and in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client.gateway.schemas.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from client.protocol import Logprob, TokenLogprobs

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(
    positions: Sequence[TokenLogprobs], num_top: int, *, as_ids: bool
) -> ChatLogprobs:
    """Return `positions` in the form of chats.

    Args:
        positions: of the tokens of a piece.
        num_top: how many of the most likely tokens to give.
        as_ids: call tokens by their ids, as vLLM's `return_tokens_as_token_ids` does.
    """
    return ChatLogprobs(
        [
            TokenLogprob(
                _name(position.chosen, as_ids),
                position.chosen.logprob,
                _bytes(position.chosen.token),
                [
                    TopLogprob(_name(each, as_ids), each.logprob, _bytes(each.token))
                    for each in position.top[:num_top]
                ],
            )
            for position in positions
        ]
    )


class CompletionLogprobsBuilder:
    """Makes the log-probabilities of one sequence of a completion, piece by piece."""

    def __init__(self, *, as_ids: bool) -> None:
        """`as_ids` as in `chat_logprobs`."""
        self._as_ids = as_ids
        self._offset = 0

    def piece(
        self, positions: Sequence[TokenLogprobs], *, first: str | None = None
    ) -> CompletionLogprobs:
        """Return those of the next tokens; `first` is a token before them that has none."""
        made = CompletionLogprobs([], [], [], [])
        if first is not None:
            self._add(made, first, first, None, None)
        for position in positions:
            top: dict[str, float] = {}
            for each in position.top:
                name = _name(each, self._as_ids)
                # Different tokens may have the same text, above all parts of characters.
                top[f"token_id:{each.token_id}" if name in top else name] = each.logprob
            chosen = position.chosen
            name = _name(chosen, self._as_ids)
            self._add(made, name, chosen.token, chosen.logprob, top)
        return made

    def _add(
        self,
        made: CompletionLogprobs,
        name: str,
        text: str,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        made.tokens.append(name)
        made.text_offset.append(self._offset)
        made.token_logprobs.append(logprob)
        made.top_logprobs.append(top)
        self._offset += len(text)


def prompt_logprobs(positions: Sequence[TokenLogprobs]) -> list[Any]:
    """Return those of a prompt as vLLM does: null for its first token."""
    return [
        None,
        *(
            {
                str(each.token_id): {
                    "logprob": each.logprob,
                    "rank": each.rank,
                    "decoded_token": each.token,
                }
                for each in (position.chosen, *position.top)
            }
            for position in positions
        ),
    ]


def _name(token: Logprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def _bytes(text: str) -> list[int] | None:
    return None if _PART_OF_A_CHARACTER in text else list(text.encode())
