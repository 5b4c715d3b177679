"""Parts of the state of a sequence, by the component that writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.protocol.messages import TokenLogprobs
from engine.text.output_parsing.tracker import OutputTracker
from engine.text.stop.checker import StopChecker


@dataclass(slots=True)
class RequestKV:
    """Where the KV of a sequence is; written by the KV cache manager only.

    Attributes:
        tables: its block table in each group of layers: block ids by logical block, and the null
            block where all tokens are behind the group's window.
        num_dropped: in each group, leading logical blocks that have been given back.
        block_hashes: content hashes of its full blocks, as far as computed.
        num_committed_blocks: blocks entered in the prefix cache.
        host_tables: host blocks in each group, while its KV is swapped out; -1 for none.
        num_swapped_tokens: tokens whose KV is in `host_tables`.
        state: block with the state after the tokens computed so far, of a model whose layers keep
            states; the null block before the first.
        state_read: block that the next step reads.
        saves: blocks of checkpoints by position, which steps in flight write.
        wanted: positions whose checkpoints other sequences can use.
        checkpoint, trailing: positions of its newest checkpoints, and of the newest one that the
            next replaces; 0: none.
    """

    tables: list[list[int]] = field(default_factory=list)
    num_dropped: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0
    host_tables: list[list[int]] = field(default_factory=list)
    num_swapped_tokens: int = 0
    state: int = 0
    state_read: int = 0
    saves: dict[int, int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    checkpoint: int = 0
    trailing: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of logical blocks that every group has."""
        return min(map(len, self.tables), default=0)


@dataclass(slots=True)
class RequestTimes:
    """Times of one sequence, in seconds of `time.monotonic()`; None: has not happened yet.

    All beams of a search share one.

    Attributes:
        last_token: written with each step that gives a token.
        num_bypassed: how many later sequences were admitted while it was the first that waited.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_bypassed: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a sequence's output beside its tokens: stop strings, tags and details.

    Attributes:
        window_ids: tokens before the next ones to release, the context needed to decode these;
            empty if that is only the last token before them.
        stop_checker: if the request has stop strings.
        tracker: parses reasoning and tool calls, for `return_sections` or a thinking budget.
        logprobs: of the output tokens not released yet, if the request asked for them.
        cumulative_logprob: sum over all output tokens, if it did.
        hidden: float32 [hidden_size], of the last token of the prompt, once it is computed, if the
            request asked for an embedding.
    """

    window_ids: list[int]
    stop_checker: StopChecker | None = None
    tracker: OutputTracker | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    hidden: NDArray[np.float32] | None = None

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Add those of the newest token."""
        self.logprobs.append(logprobs)
        self.cumulative_logprob += logprobs.logprobs[0]
