"""PrefixCache: finds the KV blocks of a prompt's prefix by the hash of their content."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.kv.block_pool import NULL_BLOCK, BlockPool
from engine.core.kv.group_windows import GroupWindows
from engine.core.kv.state_manager import StateManager
from engine.core.kv.state_saves import prompt_end
from engine.core.kv.tables import Tables
from engine.core.request import Request


def _salt_hash(cache_salt: str) -> bytes:
    """Return the parent hash of a first block, which is never the hash of tokens."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()


def _key(content_hash: bytes, group: int) -> bytes:
    """Return the name of a content in the blocks of a group of layers."""
    return content_hash + bytes([group]) if group else content_hash


class Prefix(NamedTuple):
    """What is cached of the first tokens of a request.

    Attributes:
        tables: blocks with their KV.
        missing: content hash of the next block, which would make the prefix longer; None: nothing
            would.
        num_tokens: after which the request may begin, with these blocks and its own.
        state: block with the state after them, if layers keep states.
        num_lost: tokens whose KV is cached too, but no state behind them.
    """

    tables: Tables
    missing: bytes | None = None
    num_tokens: int = 0
    state: int = NULL_BLOCK
    num_lost: int = 0


class PrefixCache:
    """Indexes the full blocks of a pool by the hash of all tokens up to their end.

    A name is a hash chained over the request's `cache_salt` and all tokens up to the block's end,
    and the group of layers: equal names mean equal KV of requests with the same salt. States are
    named likewise, by the tokens that they have consumed.

    Attributes:
        enabled: whether any block is found.
    """

    def __init__(
        self,
        pool: BlockPool,
        windows: GroupWindows,
        states: StateManager | None = None,
        *,
        enabled: bool,
    ) -> None:
        """Name blocks of `pool`, which are of groups with these windows, and those of `states`."""
        self._pool = pool
        self._states = states
        self._windows = windows
        self._block_size = windows.block_size
        self.enabled = enabled

    def find(self, request: Request) -> Prefix:
        """Return the longest cached prefix of `request`, and what it lacks.

        No blocks if it has some already, and no hash if nothing would make the prefix longer.
        Left to compute are the last token, whose logits are needed, and those that are scored. Of a
        group with a window only the last blocks are needed, which a next token sees; those
        before them are the null block. Where layers keep states, the prefix ends where one of them
        is cached; swapped-out KV serves up to there, too.
        """
        if not self.enabled or request.kv.tables:
            return Prefix([])
        limit = length = self._max_blocks(request)
        found: Tables = [[] for _ in self._windows.windows]
        for group in self._windows.without:
            found[group] = self._first_blocks(request, group, length)
            length = len(found[group])
        length = self._length_for_windows(request, length)
        missing = self._block_hash(request, length) if length < limit else None
        num_tokens, state, num_lost = length * self._block_size, NULL_BLOCK, 0
        if self._states is not None:
            most = max(num_tokens, request.kv.num_swapped_tokens)
            num_cached = num_tokens
            num_tokens, state = self._newest_state(request, most)
            while (seen := min(length, num_tokens // self._block_size)) < length:
                length = self._length_for_windows(request, seen)
                if length < seen:
                    num_tokens, state = self._newest_state(request, length * self._block_size)
            num_lost = max(0, num_cached - num_tokens)
        if not length:
            return Prefix([], missing, num_tokens, state, num_lost)
        for group, window in enumerate(self._windows.windows):
            if window is None:
                del found[group][length:]
            else:
                found[group] = self._last_blocks(request, group, window, length)
        return Prefix(found, missing, num_tokens, state, num_lost)

    def _newest_state(self, request: Request, most: int) -> tuple[int, int]:
        """Return after how many of the first `most` tokens there is a state, and its block."""
        assert self._states is not None
        interval = self._states.interval
        for position in range(most // interval * interval, 0, -interval):
            block = self._states.pool.find(self._state_name(request, position))
            if block is not None:
                return position, block
        return 0, NULL_BLOCK

    def _state_name(self, request: Request, position: int) -> bytes:
        return self._block_hash(request, position // self._block_size - 1)

    def want_states(self, request: Request, prefix: Prefix) -> None:
        """Note where checkpoints of a request are of use that begins with `prefix`.

        That is where its prompt ends, and where one ends that another request has shown to share.
        """
        if self._states is None or not self.enabled:
            return
        interval = self._states.interval
        shared = (prefix.num_tokens + prefix.num_lost) // interval * interval
        request.kv.wanted |= {prompt_end(request.num_prompt_tokens, interval), shared} - {0}

    def name_states(self, request: Request, positions: Sequence[int]) -> None:
        """Let the checkpoints be found that a step which has run has written for `request`."""
        assert self._states is not None
        for position in sorted(positions):
            name = self._state_name(request, position)
            if replaced := self._states.name(request, position, name):
                self._states.drop(self._state_name(request, replaced))

    def num_common_blocks(self, request: Request, other: Request, most: int) -> int:
        """Return how many of their first full blocks have equal content.

        Of those that `find` looks for, and at most `most`.
        """
        most = min(most, self._max_blocks(request), other.num_tokens // self._block_size)
        # A hash names all content up to its block's end.
        return bisect_left(
            range(most),
            True,
            key=lambda block_idx: (
                self._block_hash(request, block_idx) != self._block_hash(other, block_idx)
            ),
        )

    def _max_blocks(self, request: Request) -> int:
        scores, end = request.prompt_scores, request.num_tokens - 1
        if self._states is not None and request.forks:
            end -= 1  # they begin with the state before the last token, which a step must write
        if scores is not None and not scores.is_scheduled:
            end = scores.num_scheduled
        return end // self._block_size

    def _first_blocks(self, request: Request, group: int, most: int) -> list[int]:
        """Return the leading blocks that a group has cached, at most so many."""
        blocks: list[int] = []
        for block_idx in range(most):
            block = self._find(request, group, block_idx)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _length_for_windows(self, request: Request, most: int) -> int:
        """Return the longest prefix, of at most `most` blocks, whose last blocks windows have."""
        length, checked = most, most + 1
        while length < checked:
            checked = length
            for group, window in enumerate(self._windows.windows):
                if window is None:
                    continue
                block_idx = length
                while block_idx > self._windows.first_seen(window, length * self._block_size):
                    block_idx -= 1
                    if self._find(request, group, block_idx) is None:
                        length = block_idx
        return length

    def _last_blocks(self, request: Request, group: int, window: int, length: int) -> list[int]:
        """Return the blocks that a token after `length` blocks sees, after null blocks."""
        first = self._windows.first_seen(window, length * self._block_size)
        seen = [self._find(request, group, block_idx) for block_idx in range(first, length)]
        return [NULL_BLOCK] * first + [block for block in seen if block is not None]

    def _find(self, request: Request, group: int, block_idx: int) -> int | None:
        return self._pool.find(_key(self._block_hash(request, block_idx), group))

    def has_block(self, content_hash: bytes | None) -> bool:
        """Whether a block with this content is cached; False for None."""
        return content_hash is not None and self._pool.find(content_hash) is not None

    def first_hash(self, request: Request) -> bytes | None:
        """Return the hash of the first block of a request; None if nothing is found by it."""
        if not self.enabled or request.num_tokens < self._block_size:
            return None
        return self._block_hash(request, 0)

    def computing_hash(self, request: Request) -> bytes | None:
        """Return the hash of the next block that a running `request` completes by prefill."""
        block_idx = request.num_computed_tokens // self._block_size
        if not self.enabled or block_idx >= request.num_tokens // self._block_size:
            return None
        return self._block_hash(request, block_idx)

    def commit(self, request: Request, num_tokens: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens in the prefix cache.

        They must be known and computed, or the next step to run computes them. A sampled token is
        computed only if it is not the last of its sequence.
        """
        assert num_tokens <= request.num_tokens
        num_full = num_tokens // self._block_size
        if num_full <= request.kv.num_committed_blocks or not self.enabled:
            return
        for block_idx in range(request.kv.num_committed_blocks, num_full):
            content_hash = self._block_hash(request, block_idx)
            for group, table in enumerate(request.kv.tables):
                if table[block_idx] != NULL_BLOCK:
                    self._pool.commit(table[block_idx], _key(content_hash, group))
        request.kv.num_committed_blocks = num_full

    def _block_hash(self, request: Request, block_idx: int) -> bytes:
        """Return the content hash of a full block: of all tokens up to its end."""
        hashes, size = request.kv.block_hashes, self._block_size
        for i in range(len(hashes), block_idx + 1):
            parent = hashes[-1] if hashes else _salt_hash(request.cache_salt)
            tokens = request.tokens[i * size : (i + 1) * size].tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes[block_idx]
