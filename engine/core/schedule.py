"""Schedule: the scheduler's decisions about one step, which the model runner carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.kv_cache_manager import BlockCopy
from engine.core.request import Request


class ScheduledRequest(NamedTuple):  # quickly made, for each row of each step
    """Tokens of `request` that are computed in this step.

    Attributes:
        slot: of the request.
        start: position of the first of them.
        num_tokens: number of tokens.
        wants_token: they are the last of the request, so that its next token is sampled.
        first_changed_block: first index in `kv.block_ids` that may have changed since the step
            before; None if the request got its slot in this step.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    wants_token: bool
    first_changed_block: int | None

    @property
    def is_decode(self) -> bool:
        """Whether it computes only the token that was sampled last, for a request without forks."""
        return self.num_tokens == 1 and self.wants_token and not self.request.forks


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: swap out these blocks, copy and swap in those, then compute these tokens.

    Rows of one token come first: decode and prefill are different kernels, and each gets one
    range of the step's tokens. Within each kind, rows that sample a token come first.

    Attributes:
        swap_out: from blocks of the device to blocks of the host.
        copies: within the device; all are read before any is written.
        swap_in: from blocks of the host to blocks of the device.
    """

    rows: list[ScheduledRequest]
    swap_out: list[BlockCopy]
    copies: list[BlockCopy]
    swap_in: list[BlockCopy]
