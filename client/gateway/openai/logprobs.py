"""Log-probabilities in the forms of OpenAI's two routes, and in vLLM's."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import chain

import msgspec
from msgspec import Raw

from client.gateway.errors import ApiError
from client.gateway.openai.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from client.gateway.schemas.limits import MAX_LOGPROBS_AT_ONCE
from client.protocol import Logprob, TokenLogprobs

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CUT = 4096  # bytes of a stop string, and of the token that it ends in


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
                _bytes(position.chosen),
                [
                    TopLogprob(_name(each, as_ids), each.logprob, _bytes(each))
                    for each in position.top[:num_top]
                ],
            )
            for position in positions
        ]
    )


class CompletionLogprobsBuilder:
    """Makes the log-probabilities of one sequence of a completion, piece by piece.

    The offset of a token that goes on with a character is that of the character.
    """

    def __init__(self, *, as_ids: bool) -> None:
        """`as_ids` as in `chat_logprobs`."""
        self._as_ids = as_ids
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(
        self, positions: Sequence[TokenLogprobs], *, first: bytes | None = None
    ) -> CompletionLogprobs:
        """Return those of the next tokens; `first` is a token before them that has none."""
        made = CompletionLogprobs([], [], [], [])
        if first is not None:
            self._add(made, first.decode("utf-8", "replace"), first, None, None)
        for position in positions:
            top: dict[str, float] = {}
            for each in position.top:
                name = _name(each, self._as_ids)
                # Different tokens may have the same text, above all parts of characters.
                top[f"token_id:{each.token_id}" if name in top else name] = each.logprob
            chosen = position.chosen
            name = _name(chosen, self._as_ids)
            self._add(made, name, _utf8(chosen), chosen.logprob, top)
        return made

    def _add(
        self,
        made: CompletionLogprobs,
        name: str,
        data: bytes,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        made.tokens.append(name)
        made.text_offset.append(self._offset)
        made.token_logprobs.append(logprob)
        made.top_logprobs.append(top)
        self._offset += len(self._decoder.decode(data))


def first_token(
    text: str,
    prompt: str | None,
    others: Sequence[TokenLogprobs],
    answer: Sequence[TokenLogprobs],
) -> bytes:
    """Return the bytes of the first token of an echoed prompt, which has no log-probability.

    Args:
        text: the prompt, and after it the text of the answer.
        prompt: what it was, unless it came as token ids.
        others: all tokens of the prompt but the first.
        answer: its tokens; of the last ones, those that ended it, there may be no text.
    """
    whole, rest = text.encode(), b"".join(_utf8(each.chosen) for each in others)
    if prompt is not None and text.startswith(prompt):
        return whole[: max(0, len(prompt.encode()) - len(rest))]
    said = b"".join(_utf8(each.chosen) for each in answer)
    start = len(whole) - len(rest) - len(said)
    # Instead of the first byte of a character that was cut off the text has three.
    for end in range(max(0, start - 2), start + min(len(said), _LONGEST_CUT) + 1):
        shown = whole[end + len(rest) :].removesuffix(_PART_OF_A_CHARACTER.encode())
        if whole.startswith(rest, end) and said.startswith(shown):
            return whole[:end]
    # Special tokens are left out of the text, or no answer completes the end of the prompt.
    length = len((rest + said).decode("utf-8", "replace"))
    return text[: max(0, len(text) - length)].encode()


class LogprobCount:
    """Counts the log-probabilities of an answer that is there as a whole before it is sent."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, field: str, positions: Sequence[TokenLogprobs], times: int = 1) -> None:
        """Count those of some tokens.

        Args:
            field: of the request, that asks for them.
            positions: those of the tokens.
            times: how often they are in the answer.

        Raises:
            ApiError: they are too many.
        """
        self._count += times * sum(len(position.top) for position in positions)
        if self._count > MAX_LOGPROBS_AT_ONCE:
            raise ApiError(
                f"the answer has more than {MAX_LOGPROBS_AT_ONCE} log-probabilities in all prompts "
                "and sequences together; ask for fewer, or send several requests",
                param=field,
            )


def prompt_logprobs(positions: Sequence[TokenLogprobs]) -> Raw:
    """Return those of a prompt as vLLM does, as JSON: null for its first token."""
    encode = msgspec.json.Encoder().encode
    told = (
        encode(
            {
                str(each.token_id): {
                    "logprob": each.logprob,
                    "rank": each.rank,
                    "decoded_token": each.token,
                }
                for each in (position.chosen, *position.top)
            }
        )
        for position in positions
    )
    return Raw(b"[%b]" % b",".join(chain([b"null"], told)))


def _name(token: Logprob, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.token


def _bytes(token: Logprob) -> list[int] | None:
    if token.raw is None and _PART_OF_A_CHARACTER in token.token:
        return None
    return list(_utf8(token))


def _utf8(token: Logprob) -> bytes:
    return token.token.encode() if token.raw is None else token.raw
