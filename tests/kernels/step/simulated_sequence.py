"""A sequence as the engine sees it, and a model whose next token depends on the whole history."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.step.sampling_columns import LENGTH, RUNNING, STOP

VOCAB = 13


def next_token(token_ids: list[int]) -> int:
    """Return the next token of a history; it depends on every token and its position."""
    total = 0
    for position, token_id in enumerate(token_ids):
        total = (total * 31 + (position + 3) * (token_id + 1)) % 1_000_003
    return total % VOCAB


@dataclass
class Sequence:
    """A sequence, like the engine's `Request`; `reason` is as in `SeqSlotTables`."""

    prompt: list[int]
    min_tokens: int
    max_tokens: int
    stop_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    num_expected_tokens: int = 0  # including those still on the device
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1
    reason: int = RUNNING
    cancelled: bool = False

    def append(self, token_id: int) -> None:
        """As `Request.append`."""
        self.token_ids.append(token_id)
        num_outputs = len(self.token_ids) - len(self.prompt)
        if token_id in self.stop_token_ids and num_outputs > self.min_tokens:
            self.reason = STOP
        elif num_outputs >= self.max_tokens:
            self.reason = LENGTH

    def answer(self) -> tuple[list[int], int]:
        """Return all tokens and the finish reason, by plain Python."""
        alone = Sequence(self.prompt, self.min_tokens, self.max_tokens, self.stop_token_ids)
        alone.token_ids = list(self.prompt)
        while alone.reason == RUNNING:
            alone.append(next_token(alone.token_ids))
        return alone.token_ids, alone.reason
