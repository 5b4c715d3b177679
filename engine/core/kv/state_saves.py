"""Where in a sequence the states of its layers are kept as checkpoints."""

from __future__ import annotations

from collections.abc import Collection

MOST_SAVES = 4  # checkpoints of one sequence that one step writes

# A prompt's last tokens, which the next turn of a chat may have otherwise: those that begin an
# answer.
_GENERATION_PROMPT = 8


def prompt_end(num_prompt_tokens: int, interval: int) -> int:
    """Return the last checkpoint in a prompt that its chat's next turn begins with; 0: none."""
    return max(0, num_prompt_tokens - _GENERATION_PROMPT) // interval * interval


def is_trailing(position: int, num_prompt_tokens: int, wanted: Collection[int], every: int) -> bool:
    """Whether a checkpoint is of use only until the next one of its sequence is there."""
    return position > num_prompt_tokens and position % every != 0 and position not in wanted


def positions_to_save(
    start: int,
    end: int,
    *,
    interval: int,
    num_prompt_tokens: int,
    wanted: Collection[int],
    every: int,
) -> list[int]:
    """Return after how many tokens a step saves the state that computes from `start` to `end`.

    At most `MOST_SAVES`: first what is `wanted`, then the last place in the output, then some
    places so that a prompt which is edited need not be computed from its start.

    Args:
        interval: checkpoints are after multiples of it.
        wanted: positions that other sequences are known to share, and the end of the prompt.
        every: tokens after which a checkpoint pays for its memory; a multiple of `interval`.
    """
    first, last = start // interval + 1, end // interval
    if first > last:
        return []
    found = sorted(each for each in wanted if start < each <= end)
    if (trailing := last * interval) > num_prompt_tokens and trailing not in found:
        found.append(trailing)
    found += [
        position for position in range(end // every * every, start, -every) if position not in found
    ][:MOST_SAVES]
    return found[:MOST_SAVES]
