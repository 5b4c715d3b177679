"""KVCacheManager: allocates KV blocks to requests, and shares blocks of equal content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.core.kv.block_pool import NULL_BLOCK, BlockPool
from engine.core.kv.group_windows import GroupWindows, blocks_for
from engine.core.kv.prefix_cache import Prefix, PrefixCache
from engine.core.kv.state_manager import StateManager
from engine.core.kv.tables import Tables, blocks_of, num_logical_blocks
from engine.core.request import Request

_NO_HOST_BLOCK = -1


class HostBlockPool:
    """Blocks with at most one owner each. The pool may be empty."""

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks`, all free."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks; None if there are too few."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(block_ids)

    def check_idle(self) -> None:
        """Assert, by counters alone, that no block has an owner."""
        assert self.num_free == self.num_blocks, f"{self.num_blocks - self.num_free} blocks lost"

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that every block is either free or in `owned`, exactly once."""
        assert sorted([*self._free, *owned]) == list(range(self.num_blocks))


class BlockCopy(NamedTuple):
    """Copy a block's KV in every layer before the step runs.

    Both blocks are on the device (copy-on-write), or one of them is on the host (swaps).
    """

    source: int
    destination: int


class KVCacheManager:
    """Block tables of the requests over one `BlockPool`, one for each group of layers.

    The KV of a preempted request may be swapped out to blocks of the host.

    In a group with a window the blocks that no token to come sees are given back, and are found by
    their content until they are taken. Blocks for tokens to come are allocated step by step there,
    and all at once in a group without.

    Attributes:
        windows: of the groups.
        prefix_cache: finds blocks by their content.
        states: of the layers that keep some; None: none does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        windows: GroupWindows | None = None,
        states: StateManager | None = None,
    ) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens, and `num_host_blocks` on the host.

        Args:
            windows: of the groups of layers; None: all are one group without a window.
            states: of the layers that keep some; None: none does.
        """
        self.block_size = block_size
        self.windows = windows or GroupWindows((None,), block_size, max_step_tokens=1)
        # A state is of no use without the KV of the tokens before it.
        self.pool = BlockPool(num_blocks) if states is None else BlockPool(num_blocks, states.drop)
        self.host_pool = HostBlockPool(num_host_blocks)
        self.states = states
        self.prefix_cache = PrefixCache(
            self.pool, self.windows, states, enabled=enable_prefix_caching
        )

    def num_missing_blocks(self, request: Request, prefix: Tables) -> int:
        """Return how many free blocks the waiting `request` needs at most for all its tokens.

        `prefix` is what `PrefixCache.find` returned, for a request without blocks of its own.
        """
        tables, end = request.kv.tables or prefix, request.num_tokens
        num_computed = max(request.num_computed_tokens, request.kv.num_swapped_tokens)
        num_missing = 0
        for group, window in enumerate(self.windows.windows):
            table = tables[group] if tables else []
            start = max(num_computed, 0 if request.kv.tables else len(table) * self.block_size)
            num_missing += len(self._shared_blocks(table, start, end))
            if window is None:
                num_missing += blocks_for(end, self.block_size) - len(table)
                continue
            first = self.windows.first_block(window, start)
            held = sum(block != NULL_BLOCK for block in table[first:])
            wanted = blocks_for(end, self.block_size) - first
            num_missing += min(wanted, self.windows.most_blocks(window, end)) - held
        if request.kv.tables:
            return num_missing
        revived = (block for block in blocks_of(prefix) if self.pool.ref_count(block) == 0)
        return num_missing + sum(1 for _ in revived)

    def reuse_prefix(self, request: Request, prefix: Prefix) -> None:
        """Give a request the blocks that `PrefixCache.find` returned: none if it has some."""
        if self.states is not None and not request.kv.tables:
            self.states.begin(request, prefix.state, prefix.num_tokens)
        if prefix.tables:
            self.pool.share(blocks_of(prefix.tables))
            self._give(request, [list(table) for table in prefix.tables])

    @staticmethod
    def _give(request: Request, tables: Tables) -> None:
        request.kv.tables = tables
        request.kv.num_dropped = [0] * len(tables)

    def allocate(
        self, request: Request, num_new_tokens: int, *, reserve: bool = False
    ) -> list[BlockCopy] | None:
        """Allocate blocks for the KV of the next `num_new_tokens` tokens.

        Shared blocks that the tokens would be written into are replaced by private copies
        (copy-on-write); the returned copies must be carried out before the step. So is a shared
        state, but by the step itself. None, without any change, if a pool has too few blocks; what
        is behind a window is given back first.

        Args:
            reserve: groups without a window get blocks for all tokens of the request.
        """
        size, start = self.block_size, request.num_computed_tokens
        end = start + num_new_tokens
        last = request.num_tokens if reserve else end
        if self.windows.are_there:
            self._drop_unseen(request, start)
        tables = request.kv.tables or [[] for _ in self.windows.windows]
        needs: list[tuple[list[int], int, int, list[int]]] = []
        num_needed = 0
        for table, window in zip(tables, self.windows.windows, strict=True):
            first, target = len(table), blocks_for(last, size)
            shared = self._shared_blocks(table, start, last) if start < first * size else []
            if window is not None:
                first = max(first, self.windows.first_block(window, start))
                target = blocks_for(end, size)
            if target > first or shared:
                needs.append((table, first, max(0, target - first), shared))
                num_needed += needs[-1][2] + len(shared)
        if num_needed > self.pool.num_free:
            return None
        if self.states is not None:
            if self.states.needs_block(request) and not self.states.pool.num_free:
                return None
            self.states.allocate(request)
        copies: list[BlockCopy] = []
        for table, first, num_fresh, shared in needs:
            after = table[-1] if table else NULL_BLOCK
            blocks = self.pool.allocate(num_fresh + len(shared), after=after)
            assert blocks is not None
            if num_fresh:
                table += [NULL_BLOCK] * (first - len(table))
                table += blocks[:num_fresh]
            for block_idx, destination in zip(shared, blocks[num_fresh:], strict=True):
                copies.append(BlockCopy(table[block_idx], destination))
                self.pool.release([table[block_idx]])
                table[block_idx] = destination
        if needs and not request.kv.tables:
            self._give(request, tables)
        return copies

    def _shared_blocks(self, table: list[int], start: int, end: int) -> list[int]:
        """Return the indices of shared blocks that the tokens `start` to `end` are written to."""
        size = self.block_size
        block_idxs = range(start // size, min(len(table), blocks_for(end, size)))
        return [i for i in block_idxs if self.pool.ref_count(table[i]) > 1]

    def _drop_unseen(self, request: Request, num_computed_tokens: int) -> None:
        """Give back the blocks that no token to come sees."""
        kv = request.kv
        for group, table in enumerate(kv.tables):
            first = self.windows.first_block(self.windows.windows[group], num_computed_tokens)
            dropped = range(kv.num_dropped[group], min(first, len(table)))
            if dropped:
                self.pool.release(
                    table[block_idx] for block_idx in dropped if table[block_idx] != NULL_BLOCK
                )
                table[dropped.start : dropped.stop] = [NULL_BLOCK] * len(dropped)
                kv.num_dropped[group] = dropped.stop

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which has no blocks, share those of its tokens: `parent` has them all, too.

        It computes the last of them itself, even if `parent` has, for its logits.
        """
        assert not child.kv.tables
        num_tokens = child.num_tokens
        child.num_computed_tokens = num_tokens - 1
        num_blocks = blocks_for(num_tokens, self.block_size)
        self._give(child, [table[:num_blocks] for table in parent.kv.tables])
        child.kv.block_hashes = parent.kv.block_hashes[: num_tokens // self.block_size]
        child.kv.num_committed_blocks = len(child.kv.block_hashes)
        self.pool.share(blocks_of(child.kv.tables))
        if self.states is not None and child.num_computed_tokens:
            self.states.fork(parent, child)

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Move the KV of a request to the host, and free its blocks.

        The returned copies must be carried out before the next step. Shared blocks are copied too:
        the other requests may free them before this one resumes. None if the host has too few
        blocks; the request keeps its own then.
        """
        self._drop_unseen(request, request.num_computed_tokens)
        num_blocks = blocks_for(request.num_computed_tokens, self.block_size)
        tables = [table[:num_blocks] for table in request.kv.tables]
        sources = list(blocks_of(tables))
        hosts = self.host_pool.allocate(len(sources))
        if hosts is None:
            return None
        swaps, unused = list(map(BlockCopy, sources, hosts)), iter(hosts)
        request.kv.host_tables = [
            [_NO_HOST_BLOCK if block == NULL_BLOCK else next(unused) for block in table]
            for table in tables
        ]
        self.free(request)
        request.kv.num_swapped_tokens = request.num_computed_tokens
        return swaps

    def swap_in(self, request: Request, prefix: Tables) -> list[BlockCopy]:
        """Move swapped-out KV of a request from the host to its allocated blocks.

        The blocks in `prefix` have their KV from the prefix cache. The returned copies must be
        carried out before the step.
        """
        num_shared = num_logical_blocks(prefix)
        swaps = [
            BlockCopy(host, block)
            for hosts, table in zip(request.kv.host_tables, request.kv.tables, strict=False)
            for host, block in list(zip(hosts, table, strict=False))[num_shared:]
            if host != _NO_HOST_BLOCK and block != NULL_BLOCK
        ]
        self.discard_swapped(request)
        return swaps

    def discard_swapped(self, request: Request) -> None:
        """Free the host blocks of a request."""
        self.host_pool.release(_host_blocks(request))
        request.kv.host_tables = []
        request.kv.num_swapped_tokens = 0

    def lose(
        self, requests: Iterable[Request], host_block_ids: Iterable[int], others: Iterable[Request]
    ) -> None:
        """Forget KV that was to be written by a step that has not been carried out.

        Args:
            requests: those of the step. Their blocks are found in the prefix cache since the step
                was scheduled, and must not be.
            host_block_ids: blocks of the host that it was to write. The requests among `others`
                whose KV that was compute it again.
        """
        for request in requests:
            self.pool.forget(blocks_of(request.kv.tables))
        unwritten = set(host_block_ids)
        for request in others:
            if not unwritten.isdisjoint(_host_blocks(request)):
                self.discard_swapped(request)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; its tail is evicted first, its prefix last."""
        for table in request.kv.tables:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        request.kv.tables = []
        request.kv.num_committed_blocks = 0
        if self.states is not None:
            self.states.free(request)

    def reset(self, request: Request) -> None:
        """Free all KV of a request that gets other tokens."""
        self.free(request)
        self.discard_swapped(request)
        request.kv.block_hashes = []
        request.kv.wanted = set()
        request.num_computed_tokens = 0

    def check_idle(self) -> None:
        """Assert, by counters alone, that no request holds a block."""
        self.pool.check_idle()
        self.host_pool.check_idle()
        if self.states is not None:
            self.states.pool.check_idle()

    def check_integrity(self, requests: list[Request]) -> None:
        """Assert that the blocks of `requests` account for every reference in the pools."""
        if self.states is not None:
            self.states.check_integrity(requests)
        self.pool.check_integrity()
        self.host_pool.check_integrity(b for request in requests for b in _host_blocks(request))
        counts: dict[int, int] = {}
        for request in requests:
            kv = request.kv
            num_swapped = blocks_for(kv.num_swapped_tokens, self.block_size)
            assert all(len(hosts) == num_swapped for hosts in kv.host_tables)
            assert not (kv.host_tables and kv.tables)
            for table, window in zip(kv.tables, self.windows.windows, strict=False):
                # What the next token sees is there.
                first = self.windows.first_seen(window, request.num_computed_tokens)
                assert NULL_BLOCK not in table[first:]
            for block_id in blocks_of(kv.tables):
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == counts.get(block_id, 0), f"block {block_id}"


def _host_blocks(request: Request) -> Iterator[int]:
    return (b for hosts in request.kv.host_tables for b in hosts if b != _NO_HOST_BLOCK)
