"""Parts of the state of a sequence that others than the request write."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestKV:
    """Where the KV of a sequence is; written by the KV cache manager only.

    Attributes:
        block_ids: its block table.
        block_hashes: content hashes of its full blocks, as far as computed.
        num_committed_blocks: blocks entered in the prefix cache.
        host_block_ids: host blocks, while its KV is swapped out.
        num_swapped_tokens: tokens whose KV is in `host_block_ids`.
    """

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0
    host_block_ids: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0


@dataclass(slots=True)
class RequestTimes:
    """Times of one sequence, in seconds of `time.monotonic()`; None: has not happened yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0  # written with each step that gives a token
