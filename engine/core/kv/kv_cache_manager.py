"""KVCacheManager: allocates KV blocks to requests, and shares blocks of equal content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.host_block_pool import HostBlockPool
from engine.core.request import Request


class BlockCopy(NamedTuple):
    """Copy a block's KV in every layer before the step runs.

    Both blocks are on the device (copy-on-write), or one of them is on the host (swaps).
    """

    source: int
    destination: int


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def _salt_hash(cache_salt: str) -> bytes:
    """Return the parent hash of a first block, which is never the hash of tokens."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()


class KVCacheManager:
    """Block tables of the requests over one `BlockPool`.

    Full blocks are addressed by a hash chained over the request's `cache_salt` and all tokens up to
    their end, so equal hashes mean equal KV of requests with the same salt. The KV of a preempted
    request may be swapped out to blocks of the host.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens, and `num_host_blocks` on the host."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostBlockPool(num_host_blocks)

    def find_prefix(self, request: Request) -> tuple[list[int], bytes | None]:
        """Return the blocks of the longest cached prefix of `request`, and the hash of the next.

        No blocks if it has some already, and no hash if nothing would make the prefix longer.
        Left to compute are the last token, whose logits are needed, and those that are scored.
        """
        blocks: list[int] = []
        if self.enable_prefix_caching and not request.kv.block_ids:
            scores, end = request.prompt_scores, request.num_tokens - 1
            if scores is not None and not scores.is_scheduled:
                end = scores.num_scheduled
            for i in range(end // self.block_size):
                content_hash = self._block_hash(request, i)
                block_id = self.pool.find(content_hash)
                if block_id is None:
                    return blocks, content_hash
                blocks.append(block_id)
        return blocks, None

    def has_block(self, content_hash: bytes | None) -> bool:
        """Whether a block with this content is cached; False for None."""
        return content_hash is not None and self.pool.find(content_hash) is not None

    def computing_hash(self, request: Request) -> bytes | None:
        """Return the hash of the next block that a running `request` completes by prefill."""
        place = request.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or place >= request.num_tokens // self.block_size:
            return None
        return self._block_hash(request, place)

    def num_missing_blocks(self, request: Request, prefix: list[int]) -> int:
        """Return how many free blocks the waiting `request` needs for all its tokens.

        `prefix` is what `find_prefix` returned, for a request without blocks of its own.
        """
        num_blocks = blocks_for(request.num_tokens, self.block_size)
        if request.kv.block_ids:
            start, end = request.num_computed_tokens, request.num_tokens
            copied = self._shared_blocks(request.kv.block_ids, start, end)
            return num_blocks - len(request.kv.block_ids) + len(copied)
        revived = sum(self.pool.ref_count(block_id) == 0 for block_id in prefix)
        return num_blocks - len(prefix) + revived

    def reuse_prefix(self, request: Request, prefix: list[int]) -> None:
        """Give a request the blocks that `find_prefix` returned: none if it has some."""
        self.pool.share(prefix)
        request.kv.block_ids += prefix

    def allocate(self, request: Request, num_new_tokens: int) -> list[BlockCopy] | None:
        """Allocate blocks for the KV of the next `num_new_tokens` tokens.

        Shared blocks that the tokens would be written into are replaced by private copies
        (copy-on-write); the returned copies must be carried out before the step. None, without any
        change, if the pool has too few blocks.
        """
        block_ids = request.kv.block_ids
        start = request.num_computed_tokens
        end = start + num_new_tokens
        shared = self._shared_blocks(block_ids, start, end)
        num_missing = max(0, blocks_for(end, self.block_size) - len(block_ids))
        if not num_missing and not shared:
            return []
        last = block_ids[-1] if block_ids else None
        blocks = self.pool.allocate(num_missing + len(shared), after=last)
        if blocks is None:
            return None
        block_ids.extend(blocks[:num_missing])
        copies = []
        for i, destination in zip(shared, blocks[num_missing:], strict=True):
            copies.append(BlockCopy(block_ids[i], destination))
            self.pool.release([block_ids[i]])
            block_ids[i] = destination
        return copies

    def _shared_blocks(self, block_ids: list[int], start: int, end: int) -> list[int]:
        """Return the places of shared blocks that the tokens `start` to `end` are written to."""
        size = self.block_size
        places = range(start // size, min(len(block_ids), blocks_for(end, size)))
        return [i for i in places if self.pool.ref_count(block_ids[i]) > 1]

    def commit(self, request: Request, num_tokens: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens in the prefix cache.

        They must be known and computed, or the next step to run computes them. A sampled token is
        computed only if it is not the last of its sequence.
        """
        num_full = num_tokens // self.block_size
        if num_full <= request.kv.num_committed_blocks or not self.enable_prefix_caching:
            return
        for i in range(request.kv.num_committed_blocks, num_full):
            self.pool.commit(request.kv.block_ids[i], self._block_hash(request, i))
        request.kv.num_committed_blocks = num_full

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which has no blocks, share those of its tokens: `parent` has them all, too.

        It computes the last of them itself, even if `parent` has, for its logits.
        """
        assert not child.kv.block_ids
        num_tokens = child.num_tokens
        child.num_computed_tokens = num_tokens - 1
        child.kv.block_ids = parent.kv.block_ids[: blocks_for(num_tokens, self.block_size)]
        child.kv.block_hashes = parent.kv.block_hashes[: num_tokens // self.block_size]
        child.kv.num_committed_blocks = len(child.kv.block_hashes)
        self.pool.share(child.kv.block_ids)

    def swap_out(self, request: Request) -> list[BlockCopy] | None:
        """Move the KV of a request to the host, and free its blocks.

        The returned copies must be carried out before the next step. Shared blocks are copied too:
        the other requests may free them before this one resumes. None, without any change, if the
        host has too few blocks.
        """
        num_blocks = blocks_for(request.num_computed_tokens, self.block_size)
        host_block_ids = self.host_pool.allocate(num_blocks)
        if host_block_ids is None:
            return None
        swaps = list(map(BlockCopy, request.kv.block_ids[:num_blocks], host_block_ids))
        self.free(request)
        request.kv.host_block_ids = host_block_ids
        request.kv.num_swapped_tokens = request.num_computed_tokens
        return swaps

    def swap_in(self, request: Request, num_shared: int) -> list[BlockCopy]:
        """Move swapped-out KV of a request from the host to its allocated blocks.

        The first `num_shared` of these have their KV from the prefix cache. The returned copies
        must be carried out before the step.
        """
        host_block_ids = request.kv.host_block_ids
        block_ids = request.kv.block_ids[: len(host_block_ids)]
        swaps = list(map(BlockCopy, host_block_ids[num_shared:], block_ids[num_shared:]))
        self.discard_swapped(request)
        return swaps

    def discard_swapped(self, request: Request) -> None:
        """Free the host blocks of a request."""
        self.host_pool.release(request.kv.host_block_ids)
        request.kv.host_block_ids = []
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
            self.pool.forget(request.kv.block_ids)
        unwritten = set(host_block_ids)
        for request in others:
            if not unwritten.isdisjoint(request.kv.host_block_ids):
                self.discard_swapped(request)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; its tail is evicted first, its prefix last."""
        self.pool.release(reversed(request.kv.block_ids))
        request.kv.block_ids = []
        request.kv.num_committed_blocks = 0

    def reset(self, request: Request) -> None:
        """Free all KV of a request that gets other tokens."""
        self.free(request)
        self.discard_swapped(request)
        request.kv.block_hashes = []
        request.num_computed_tokens = 0

    def _block_hash(self, request: Request, place: int) -> bytes:
        """Return the content hash of a full block: of all tokens up to its end."""
        hashes, size = request.kv.block_hashes, self.block_size
        for i in range(len(hashes), place + 1):
            parent = hashes[-1] if hashes else _salt_hash(request.cache_salt)
            tokens = request.tokens[i * size : (i + 1) * size].tobytes()
            hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())
        return hashes[place]

    def check_idle(self) -> None:
        """Assert, by counters alone, that no request holds a block."""
        self.pool.check_idle()
        self.host_pool.check_idle()

    def check_integrity(self, requests: list[Request]) -> None:
        """Assert that the blocks of `requests` account for every reference in the pools."""
        self.pool.check_integrity()
        self.host_pool.check_integrity(b for request in requests for b in request.kv.host_block_ids)
        counts: dict[int, int] = {}
        for request in requests:
            num_swapped = blocks_for(request.kv.num_swapped_tokens, self.block_size)
            assert len(request.kv.host_block_ids) == num_swapped
            assert not (request.kv.host_block_ids and request.kv.block_ids)
            for block_id in request.kv.block_ids:
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == counts.get(block_id, 0), f"block {block_id}"
